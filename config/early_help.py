"""Imported before anything else by train.py: `--help` is printed before torch is imported."""

from __future__ import annotations

import sys

if sys.argv[0].endswith("train.py") and {"-h", "--help"} & {*sys.argv[1:]}:
    from common.command import exit_code_of
    from config.help import main

    sys.exit(exit_code_of(main))
