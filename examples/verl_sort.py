"""The digit-sorting task for verl: data in parquet files, and a reward function that verl loads by path.

    python -m examples.verl_sort FOLDER

The folder gets train.parquet and test.parquet.
"""

import argparse
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

TRAIN_ROWS, TEST_ROWS = 512, 64
SEED_OF_TRAIN, SEED_OF_TEST = 2_000, 3_000


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return verl's reward: 1.0 if the completion is exactly the answer, else 0.0."""
    return float(solution_str == ground_truth)


def rows(asked: Iterable[str]) -> list[dict[str, Any]]:
    from examples.tiny_model import task

    return [
        {
            "data_source": "digit-sort",
            "prompt": task.prompt(problem),
            "reward_model": {"style": "rule", "ground_truth": task.answer(problem)},
            "extra_info": {"index": index},
        }
        for index, problem in enumerate(asked)
    ]


def main() -> None:
    import pandas

    from examples.tiny_model import task

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed, count in (("train", SEED_OF_TRAIN, TRAIN_ROWS), ("test", SEED_OF_TEST, TEST_ROWS)):
        pandas.DataFrame(rows(islice(task.problems(seed), count))).to_parquet(folder / f"{name}.parquet")


if __name__ == "__main__":
    main()
