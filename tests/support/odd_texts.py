"""Texts that tokenizers trip over."""

from __future__ import annotations

from hypothesis import strategies as st

AWKWARD = [
    " leading and trailing  ",
    "\n\nlines\nand\r\nothers\r",
    "\ttabs\t and \x00 NUL \x00\x00",
    "family: \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 flag \U0001f1eb\U0001f1f7",
    "e\u0301 is not \u00e9; \u1100\u1161 is not \uac00",
    "no-break\u00a0space, line\u2028separator, \u3000 wide, \ufeff mark",
    "<unk> [UNK] </s> <|endoftext|> ## ▁ Ġ don't , . ! ?",
    "\x85\x0b\x0c\x1c\x1f\x7f\u200b\u00ad",
    "\U0010ffff\uffff\ue000\ufffd",
    " ",
    "\r\n",
]


UNICODE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)


SPACED = st.text(st.sampled_from("ab \t\r\n\x00\u0301\u200d,.'"), min_size=1, max_size=80)
