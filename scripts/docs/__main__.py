"""The documentation's tools: writes the generated parts of README.md and docs/, and checks all of it.

    python -m scripts.docs            # write
    python -m scripts.docs --check    # check

A check ends with exit code 1 where a page is stale, or names what does not exist.
"""

import argparse
import sys

from scripts.docs.commands import wrong_commands
from scripts.docs.generated import stale_pages, write_pages
from scripts.docs.links import dead_links
from scripts.docs.python import wrong_python


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes or checks the generated parts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where something is wrong")
    if not parser.parse_args().check:
        write_pages()
        return
    wrong = [*stale_pages(), *dead_links(), *wrong_commands(), *wrong_python()]
    print("\n".join(wrong) or "docs: pages, links, files, functions, commands and Python are right")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
