"""Run the command line with `python -m replay_pipeline.cli`."""

from replay_pipeline.cli import main

if __name__ == "__main__":
    main()
