"""``python -m narrowgate.gates``: the same program as ``narrowgate``."""

from .cli import main

if __name__ == "__main__":
    main()
