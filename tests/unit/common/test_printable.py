"""What stands in a text, a snapshot or an answer never acts on the terminal that shows it."""

from __future__ import annotations

from common.printable import printable


def test_what_a_terminal_would_execute_is_shown_as_an_escape():
    assert printable("\x1b]0;title\x07\x1b[31mred\x1b[0m") == r"\x1b]0;title\x07\x1b[31mred\x1b[0m"
    assert printable("a\rb\bc\x7f\x9b2J") == r"a\rb\x08c\x7f\x9b2J"
    assert printable("one\ntwo\tthree\u2028four") == r"one\ntwo\tthree\u2028four"
    assert printable("txt.\u202egpj \ud800") == r"txt.\u202egpj \ud800"


def test_newlines_and_tabs_are_kept_where_that_is_asked_for():
    assert printable("one\n\ttwo\r\n\x1b[2J", multiline=True) == "one\n\ttwo\\r\n\\x1b[2J"


def test_letters_of_any_script_are_left_alone():
    text = "Größe 你好\u3000世界 שלום नमस्ते 👩‍👩‍👧 a\u00a0b \\x1b"
    assert printable(text) == text
    shown = printable("".join(map(chr, [*range(0x3100), *range(0xD7F0, 0xE010)])))
    assert not {*map(chr, range(32)), *map(chr, range(127, 160))} & set(shown)
    shown.encode("utf-8")
