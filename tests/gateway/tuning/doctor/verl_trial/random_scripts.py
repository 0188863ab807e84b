"""Scripts of ours that start verl's trainer, drawn from the constructs of bash that verl's examples have."""

import random
from collections.abc import Callable

_KEYS = ("data.train_batch_size", "actor_rollout_ref.rollout.n", "trainer.nnodes", "trainer.project_name", "+data.free")
_NAMES = ("SIZE", "TP", "MODEL", "ROOT", "KIND", "LENGTH")
_WORDS = ("a b", "it's", "$5", "[1,2]", "x=y", "ü", "*", "", "C:\\\\d", "100%")


def _number(draw: random.Random) -> str:
    return str(draw.randrange(1, 64))


def _name(draw: random.Random) -> str:
    return draw.choice(_NAMES)


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _plain(draw: random.Random) -> str:
    return f"{_name(draw)}={_number(draw)}"


def _text(draw: random.Random) -> str:
    return f"{_name(draw)}={_quoted(draw.choice(_WORDS))}"


def _nested_default(draw: random.Random) -> str:
    return f'{_name(draw)}=${{{_name(draw)}:-"${{{_name(draw)}:-/m}}/x-${{{_name(draw)}:-{_number(draw)}}}"}}'


def _arithmetic(draw: random.Random) -> str:
    a, b, c = (_number(draw) for _ in range(3))
    return f"N{draw.randrange(3)}={a}; {_name(draw)}=$((((N0 + {a}) * {b} + 1) / {c}))"


def _condition(draw: random.Random) -> str:
    then, other = _number(draw), _number(draw)
    test = draw.choice([f"[ {_number(draw)} -gt 30 ]", f'[[ "${_name(draw)}" == *1* ]]', f'[ -z "${_name(draw)}" ]'])
    return f"if {test}; then\n  {_name(draw)}={then}\nelse\n  {_name(draw)}={other}\nfi"


def _case(draw: random.Random) -> str:
    arms = "\n".join(f"  {pattern}) {_name(draw)}={_number(draw)} ;;" for pattern in ("1*", "[2-5]?", "a|b", "*"))
    return f'case "${_name(draw)}" in\n{arms}\nesac'


def _loop(draw: random.Random) -> str:
    return f'for i in 1 2 {_number(draw)}; do {_name(draw)}="${_name(draw)}-$i"; done'


def _function(draw: random.Random) -> str:
    name = _name(draw)
    return f'pick() {{ local it=${{1:-{_number(draw)}}}; {name}="$it.$#"; }}\npick {_number(draw)} "$SIZE"'


def _suffix(draw: random.Random) -> str:
    cut = draw.choice(["##*/", "%-*", ",,", "^^", "/1/one", ":0:3"])
    return f"{_name(draw)}=${{{_name(draw)}{cut}}}"


def _array(draw: random.Random) -> str:
    values = "\n".join(f"  {draw.choice(_KEYS)}={_quoted(draw.choice(_WORDS))}  # kept" for _ in range(2))
    return f"EXTRA+=(\n{values}\n)"


def _output(draw: random.Random) -> str:
    return f"{_name(draw)}=$(nproc)"


def _short(draw: random.Random) -> str:
    return f'[ -n "${_name(draw)}" ] && {_name(draw)}={_number(draw)} || {_name(draw)}={_number(draw)}'


_STATEMENTS: tuple[Callable[[random.Random], str], ...] = (
    _plain, _text, _nested_default, _arithmetic, _condition, _case, _loop, _function, _suffix, _array, _output, _short,
)  # fmt: skip


def drawn(seed: int) -> str:
    """Return a script; the same for a seed."""
    draw = random.Random(seed)
    lines = ["#!/bin/bash", draw.choice(["set -x", "set -e", "export A=1", ""]), "EXTRA=()"]
    lines += [draw.choice(_STATEMENTS)(draw) for _ in range(draw.randrange(3, 14))]
    command = ["python3 -m verl.trainer.main_ppo"]
    for key in draw.sample(_KEYS, draw.randrange(2, 5)):
        value = draw.choice([f"${{{_name(draw)}}}", f'"${_name(draw)}"', f"${{{_name(draw)}:-{_number(draw)}}}", "7"])
        command.append(f"{key}={value}")
    command.append('"${EXTRA[@]}" $@')
    if draw.random() < 0.2:
        command.insert(draw.randrange(1, len(command)), "# cuts the command off")
    end = draw.choice(["", " 2>&1 | tee run.log", " &\nwait", " > /dev/null"])
    return "\n".join(lines) + "\n" + " \\\n  ".join(command) + end + "\n"
