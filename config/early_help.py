"""Imported before anything else by train.py: `--help` is printed before torch is imported."""

from __future__ import annotations

import sys

if sys.argv[0].endswith("train.py") and {"-h", "--help"} & {*sys.argv[1:]}:
    from config.help import main
    from data.command import exit_code_of

    sys.exit(exit_code_of(main))
