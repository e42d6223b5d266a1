"""Prints the table of mutants: each defect, and the guard that caught it."""

import warnings

import pytest

from tests.mutants import MUTANTS


def main() -> None:
    """Install each mutant, ask, and print a Markdown table."""
    warnings.simplefilter("ignore")
    print("| where | defect | caught by |\n|---|---|---|")
    for mutant in MUTANTS.values():
        with pytest.MonkeyPatch.context() as patch:
            mutant.install(patch)
            found = mutant.scenario.caught_by() or "nothing"
        print(f"| {mutant.room} | {mutant.defect} | {found} |", flush=True)


if __name__ == "__main__":
    main()
