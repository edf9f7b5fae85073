"""What is gone answers with what to do instead."""

from __future__ import annotations

import pytest

from config import removed, schema
from config.compose import load_config
from config.schema import ConfigError
from plan import parse as plan
from proving.command import parse as prove
from snapshot.__main__ import parse as snapshot

KEYS = [name for name in removed.REMOVED if " " not in name]


@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_is_gone_says_what_to_do_instead(name: str) -> None:
    argument = name if "=" in name else f"{name}=1"
    with pytest.raises(ConfigError) as mistake:
        load_config([argument])
    assert f"{name} was removed in 0.2.0: {removed.REMOVED[name]}." in str(mistake.value)


def test_no_key_of_the_schema_is_in_the_table() -> None:
    assert not set(schema.KEYS) & set(KEYS)
    assert {name.partition("=")[0] for name in KEYS if "=" in name} <= set(schema.KEYS)


@pytest.mark.parametrize("name", [name for name in removed.REMOVED if " " in name])
def test_an_option_that_is_gone_says_what_to_do_instead(name, capsys):
    program, option = name.rsplit(" ", 1)
    parse = {"prove.py": prove, "plan.py": plan, "python -m snapshot": snapshot}[program]
    for words in ([option, "8"], [f"{option}=8"]):
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{name} was removed in 0.2.0: {removed.REMOVED[name]}." in said
