"""Prints the table of mutants: each defect, and the guard that catches it."""

import warnings

from tests.mutants import MUTANTS

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("| file | mutant | defect | caught by |\n|---|---|---|---|")
    for mutant in MUTANTS.values():
        with mutant.planted():
            found = mutant.scenario.caught_by()
        guard = found or ("only the tests" if mutant.test else "NOTHING")
        print(f"| {mutant.file} | {mutant.name} | {mutant.defect} | {guard} |", flush=True)
