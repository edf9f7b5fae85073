"""Conversations with tools: what a template gets of them, from every format, as transformers."""

from __future__ import annotations

import json

import datasets
import pytest

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


def call(name: str, **arguments: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: str) -> dict:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ROWS = [
    {
        "messages": [
            {"role": "user", "content": "where"},
            {"role": "assistant", "content": None, "tool_calls": [call("go", to="the run", n=3)]},
            {"role": "tool", "content": "it was"},
            {"role": "assistant", "content": "no step", "reasoning_content": "as it was"},
        ],
        "tools": [tool("go", to="string", n="integer"), tool("lose", step="integer")],
        "documents": [{"title": "Größe", "text": "x"}],
    },
    {
        "messages": [
            {"role": "user", "content": "the"},
            {"role": "assistant", "content": None, "tool_calls": [call("lose", step=1), call("a")]},
        ],
        "tools": [tool("lose", step="integer")],
        "documents": None,
    },
    {
        "messages": [
            {"role": "user", "content": "and"},
            {"role": "assistant", "content": "on", "thinking": "twice"},
        ],
        "tools": None,
        "documents": None,
    },
]
PARTS = {"role": "user", "content": [{"type": "text", "text": "in parts"}, {"type": "image"}]}


def parquet(path, rows, **options):
    datasets.Dataset.from_list(rows, **options).to_parquet(path)
    return path


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def of_any_type(path, rows):
    """What `datasets` writes as JSON, because no type is that of all: null is a value there."""
    changed = json.loads(json.dumps(rows))
    changed[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"n": "x", "of": None}
    changed[2]["messages"][0] = PARTS
    return changed, parquet(path, changed, on_mixed_types="use_json")


@pytest.fixture
def prepare_chats(prepare, tmp_path):
    def prepare_chats(source, template=TOOLS):
        folder = tmp_path / str(abs(hash(template)))
        folder.mkdir(exist_ok=True)
        chats.tokenizer(template).save(folder)
        usual = {"val_fraction": 0.3, "block_size": 2000, "documents": "conversations"}
        return prepare(source, tokenizer=folder, **usual), folder

    return prepare_chats


@pytest.mark.parametrize("kind", ["lines", "parquet", "parquet of JSON"])
def test_a_template_gets_tools_as_transformers_gives_them(prepare_chats, tmp_path, kind):
    from transformers import AutoTokenizer

    rows = ROWS
    if kind == "lines":
        source = lines(tmp_path / "a.jsonl", ROWS)
    elif kind == "parquet":
        source = parquet(tmp_path / "a.parquet", ROWS)
    else:
        rows, source = of_any_type(tmp_path / "a.parquet", ROWS)
    corpus, folder = prepare_chats(source)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected, size = [], 0
    for row in rows:
        one = theirs.apply_chat_template(
            row["messages"],
            tools=row["tools"],
            documents=row["documents"],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        expected.append((one["input_ids"], one["assistant_masks"]))
        targets = [i for i, flag in zip(*expected[-1], strict=True) if flag]
        size += len(theirs.decode(targets).replace("<|im_end|>", "").encode())
    assert conversations_of(corpus) == expected
    assert corpus.info.train_bytes + corpus.info.held_out_bytes == size


def test_replies_that_are_only_calls_have_bytes(prepare_chats, tmp_path):
    corpus, _ = prepare_chats(lines(tmp_path / "a.jsonl", [ROWS[1]] * 4))
    assert corpus.info.held_out_bytes == len('\ncall lose {"step": 1}\ncall a {}')


@pytest.mark.parametrize("write", [lines, parquet])
def test_rows_without_messages_or_reply_are_left_out(prepare_chats, tmp_path, write):
    """A template may mark an empty reply with nothing; a table has null for what is absent."""
    unended = chats.CHATML.replace(
        "m['content'] + '<|im_end|>' }}{% endgeneration %}",
        "m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert unended != chats.CHATML
    told = [chats.said("the run", "goes on"), chats.said("where", ""), None]
    rows = [{"messages": one} for one in told * 9]
    name = "a.jsonl" if write is lines else "a.parquet"
    info = prepare_chats(write(tmp_path / name, rows), unended)[0].info
    assert (info.documents, info.left_out) == (9, 9)


WRONG = {
    "no content": ({"messages": [{"role": "user", "contents": "a"}]}, "content is not a text"),
    "tools of another kind": ({"tools": ["go"]}, "tools is not a list of objects: ['go']"),
    "documents of another kind": ({"documents": "a text"}, "rename the column"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_is_no_conversation_is_refused(prepare_chats, tmp_path, name):
    changes, sentence = WRONG[name]
    with pytest.raises(DataError, match="row 2") as refused:
        prepare_chats(lines(tmp_path / "a.jsonl", [ROWS[0], {**ROWS[1], **changes}]))
    assert sentence in str(refused.value)
