"""Every way of starting the program, every signal, first process or not: what is bought, what is lost.

Prints the table of docs/deploy.md and fails where a mark is missed. Needs Linux and the right to make
process namespaces (`unshare`).
"""

import itertools
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.stopping import FORMS, LATENCY_S, N_IN_FLIGHT, Stop, stop

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


def is_missed(number: signal.Signals, done: Stop) -> bool:
    """Whether a mark is missed: what is killed may lose what was in flight, and nothing else."""
    n_losable = N_IN_FLIGHT if number == signal.SIGKILL else 0
    return bool(done.n_late or done.n_lost > n_losable or done.seconds > LATENCY_S + 2.0)


def main() -> None:
    missed = 0
    print(
        "| started as | signal | first process | calls a second later | answers lost | s to the end | status |"
    )
    print("|---|---|---|---|---|---|---|")
    forms = sys.argv[1:] or FORMS
    for form, number, is_first in itertools.product(forms, SIGNALS, (False, True)):
        with tempfile.TemporaryDirectory() as folder:
            done = stop(form, number, Path(folder), is_first=is_first, is_deaf=False)
        missed += is_missed(number, done)
        print(
            f"| {form} | {number.name} | {'yes' if is_first else 'no'} | {done.n_late} | "
            f"{done.n_lost} | {done.seconds:.1f} | {done.status} |"
            f"{' MISSED' if is_missed(number, done) else ''}",
            flush=True,
        )
    sys.exit(f"{missed} marks missed" if missed else 0)


if __name__ == "__main__":
    main()
