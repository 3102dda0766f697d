"""Run commands that the matcher calls the same, and see whether they do the same.

    python -m tests.twins --count 100000 --seed 1

Of every program whose options `shell_programs.toml` knows, twins are made (options in another order
or spelling, joined or split, repeated and in conflict, operands that look like options, `--`,
respelt paths). Those that the matcher merges are run in a throw-away folder with the machine's own
tools. A pair that differs in what it prints, in its exit status or in the files it leaves is a false
merge: it is shown, and the exit status is 1.

Everything runs in namespaces of its own where the system allows that: no network, no other process
in sight, every file system read-only but the folder. Elsewhere what could reach further is left out.
"""
