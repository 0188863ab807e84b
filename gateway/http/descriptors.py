"""The limit of open files of this process."""

import resource

import structlog

log = structlog.get_logger()

_MOST, _FEW = 1 << 20, 16_384


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each client and each request to an engine needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY:
        return
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:
            log.warning("the limit of open files cannot be raised", soft=soft, hard=hard, error=str(error))
    if soft < _FEW:
        log.warning(
            "few open files are allowed: raise the hard limit (ulimit -Hn) above two for each rollout in flight",
            limit=soft,
        )
