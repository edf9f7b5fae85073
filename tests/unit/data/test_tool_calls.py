"""Conversations with tools: what a template gets of them, from every format, as transformers."""

from __future__ import annotations

import json

import datasets
import pytest
from transformers import AutoTokenizer

import chats
from data.errors import DataError
from texts import conversations_of

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% if documents %}{{ documents[0].title + '\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')\n' }}{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}"
    "{{ '\ncall ' + call.function.name + ' ' + (call.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% elif m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part | tojson }}{% endfor %}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def asks(content: object) -> dict:
    return {"role": "user", "content": content}


def calls(*several: tuple[str, dict]) -> dict:
    made = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in several
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def tool(name: str, **properties: str) -> dict:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ROWS = [
    {
        "messages": [
            asks("where"),
            calls(("go", {"to": "the run", "n": 3})),
            {"role": "tool", "content": "it was"},
            {"role": "assistant", "content": "no step", "reasoning_content": "as it was"},
        ],
        "tools": [tool("go", to="string", n="integer"), tool("lose", step="integer")],
        "documents": [{"title": "Größe", "text": "x"}],
    },
    {
        "messages": [asks("the"), calls(("lose", {"step": 1}), ("a", {}))],
        "tools": [tool("lose", step="integer")],
        "documents": None,
    },
    {
        "messages": [asks("and"), {"role": "assistant", "content": "on", "thinking": "twice"}],
        "tools": None,
        "documents": None,
    },
]
OF_ANY_TYPE = json.loads(json.dumps(ROWS))
"""What `datasets` writes as JSON, because no type is that of all: null is a value there."""
OF_ANY_TYPE[1]["messages"][1] = calls(("lose", {"n": "x", "of": None}), ("a", {}))
OF_ANY_TYPE[2]["messages"][0] = asks([{"type": "text", "text": "in parts"}, {"type": "image"}])


def parquet(path, rows, **options):
    datasets.Dataset.from_list(rows, **options).to_parquet(path)
    return path


def of_any_type(path, rows):
    return parquet(path, rows, on_mixed_types="use_json")


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prepare_chats(prepare, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()

    def prepare_chats(source, template=TOOLS):
        chats.tokenizer(template).save(folder)
        usual = {"val_fraction": 0.3, "block_size": 2000, "documents": "conversations"}
        return prepare(source, tokenizer=folder, **usual)

    return prepare_chats


@pytest.mark.parametrize(
    ("write", "rows"), [(lines, ROWS), (parquet, ROWS), (of_any_type, OF_ANY_TYPE)]
)
def test_a_template_gets_tools_as_transformers_gives_them(prepare_chats, tmp_path, write, rows):
    name = "a.jsonl" if write is lines else "a.parquet"
    corpus = prepare_chats(write(tmp_path / name, rows))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected, size = [], 0
    for row in rows:
        chat = theirs.apply_chat_template(
            row["messages"],
            tools=row["tools"],
            documents=row["documents"],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        expected.append((chat["input_ids"], chat["assistant_masks"]))
        targets = [i for i, flag in zip(*expected[-1], strict=True) if flag]
        size += len(theirs.decode(targets).replace("<|im_end|>", "").encode())
    assert conversations_of(corpus) == expected
    assert corpus.info.train_bytes + corpus.info.held_out_bytes == size


def test_replies_that_are_only_calls_have_bytes(prepare_chats, tmp_path):
    corpus = prepare_chats(lines(tmp_path / "a.jsonl", [ROWS[1]] * 4))
    assert corpus.info.held_out_bytes == len('\ncall lose {"step": 1}\ncall a {}')


@pytest.mark.parametrize("write", [lines, parquet])
def test_rows_without_messages_or_reply_are_left_out(prepare_chats, tmp_path, write):
    """A template may mark an empty reply with nothing; a table has null for what is absent."""
    ended = "m['content'] + '<|im_end|>' }}{% endgeneration %}"
    unended = "m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
    told = [chats.said("the run", "goes on"), chats.said("where", ""), None]
    name = "a.jsonl" if write is lines else "a.parquet"
    source = write(tmp_path / name, [{"messages": messages} for messages in told * 9])
    info = prepare_chats(source, chats.CHATML.replace(ended, unended)).info
    assert (info.documents, info.left_out) == (9, 9)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"messages": [{"role": "user", "contents": "a"}]}, "row 2 .* content is not a text"),
        ({"tools": ["go"]}, r"row 2 .* tools is not a list of objects: \['go'\]"),
        ({"documents": "a text"}, "row 2 .* rename the column"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(prepare_chats, tmp_path, changes, sentence):
    with pytest.raises(DataError, match=sentence):
        prepare_chats(lines(tmp_path / "a.jsonl", [ROWS[0], {**ROWS[1], **changes}]))
