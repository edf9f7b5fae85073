"""The page of a Space in a browser: what a reader types, sees and hears; on the CPU and a GPU."""

from __future__ import annotations

import json

import pytest
import torch

import web_browser
from data.tokenizer import CharTokenizer
from model.generate import generate
from snapshot.named_model import find_model
from spaces import random_model, space_of

CHARACTERS = CharTokenizer("".join(sorted("\n <>/abcdefghijklmnopqrstuvwxyz🙂")))
CONTEXT, LENGTH = 8, 70
GPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
"""A simulated GPU, which any machine has."""
READY = "document.getElementById('status').textContent.startsWith('Ready')"
STATUS = "document.getElementById('status').textContent"
TEXT = "document.getElementById('output').textContent"
COUNT = f"Array.from({TEXT}).length"
"""Characters, of which some are two units of JavaScript's length."""
IDLE = "!document.getElementById('generate').disabled"
ENDLESS = 100_000
MODULES = """
const load = (name) => import(new URL(name, location.href));
const { readSpace, readWeights } = await load("files.js");
const [{ GPT2 }, { GPT2OnGPU, findDevice }, { Model }, { generate }] = await Promise.all(
  ["gpt2.js", "webgpu.js", "model.js", "generate.js"].map(load));
const folder = new URL("./", location.href);
const { space, config } = await readSpace(folder);
const weights = () => readWeights(folder, space.weights);
"""


@pytest.fixture(scope="module")
def chromium():
    with web_browser.chromium(*GPU) as running:
        yield running


@pytest.fixture(scope="module", params=["gelu_new"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    sizes = {"n_layer": 2, "n_positions": CONTEXT}
    return random_model(folder, CHARACTERS, activation_function=request.param, **sizes)


@pytest.fixture(scope="module")
def address(model, tmp_path_factory):
    with web_browser.served(space_of(model, tmp_path_factory.mktemp("space") / "space")) as address:
        yield address


@pytest.fixture
def page(chromium, address):
    """The page, once it has its model; nothing in it may fail."""
    page = chromium.open(address)
    page.wait_for(READY)
    yield page
    assert page.errors == []
    page.go_to("about:blank")  # ends what it generates


def fill(page, **values) -> None:
    """Give the fields values, and the prompt the focus."""
    for name, value in values.items():
        field = f"document.getElementById({json.dumps(name.replace('_', '-'))})"
        page.evaluate(f"{field}.value = {json.dumps(str(value))}")
    page.evaluate("document.getElementById('prompt').focus()")


def greedy(model, prompt: str, length: int) -> str:
    """The text as sample.py generates it at temperature 0."""
    ids = torch.from_numpy(CHARACTERS.encode(prompt).astype("int64"))[None]
    tokens = generate(find_model(str(model)).load(), ids, length, temperature=0)
    return prompt + CHARACTERS.decode([int(token) for token in tokens])


def test_greedy_text_is_that_of_sample_py_beyond_the_context(page, model, address):
    page.evaluate(
        "window.lengths = []; new MutationObserver(() => lengths.push("
        f"{COUNT})).observe(document.getElementById('output'), "
        "{childList: true, characterData: true, subtree: true})"
    )
    fill(page, prompt="", length=LENGTH, temperature=0)
    page.type("the 🙂")
    page.press("Enter", control=True)
    page.wait_for(f"{IDLE} && {STATUS}.includes(' a second')")
    assert page.evaluate(TEXT) == greedy(model, "the 🙂", LENGTH)
    assert f"{LENGTH} characters, " in page.evaluate(STATUS)
    lengths = page.evaluate("window.lengths")
    assert lengths == sorted(lengths)
    assert page.requested
    assert all(one.startswith((address, "data:")) for one in page.requested)


def test_text_arrives_as_it_is_generated_and_can_be_stopped(page):
    fill(page, prompt="a", length=ENDLESS)
    page.evaluate("document.getElementById('generate').click()")
    page.wait_for(f"{COUNT} > 20")
    first = page.evaluate(TEXT)
    page.wait_for(f"{COUNT} > {len(first)}")
    assert page.evaluate(TEXT).startswith(first)
    assert page.evaluate("document.getElementById('output').ariaBusy") == "true"
    page.evaluate("document.getElementById('stop').click()")
    page.wait_for(IDLE)
    assert page.evaluate("document.getElementById('output').ariaBusy") == "false"
    text = page.evaluate(TEXT)
    assert 20 < len(text) < ENDLESS
    assert f"{len(text) - 1:,} characters, " in page.evaluate(STATUS)
    fill(page, prompt="b", length=3, temperature=0)  # and another can begin
    page.evaluate("document.getElementById('generate').click()")
    page.wait_for(f"{IDLE} && {COUNT} === 4")


def test_a_keyboard_is_enough(page):
    page.evaluate("document.activeElement.blur()")
    order = []
    for _ in range(5):
        page.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert order == ["prompt", "length", "temperature", "top-k", "generate"]
    page.evaluate("document.getElementById('length').value = 100000")
    page.press("Enter")  # on the button, which it disables
    page.wait_for("document.activeElement.id === 'output'")
    page.wait_for(f"{COUNT} > 5")
    page.press("Escape")
    page.wait_for(IDLE)
    fill(page, prompt="c", length=4)
    page.press("Enter", control=True)
    page.wait_for(f"{IDLE} && {COUNT} === 5")


def test_a_screen_reader_has_names_and_hears_the_text(page):
    parts = page.accessibility()
    for part in (
        ("textbox", "Prompt"),
        ("spinbutton", "Length in tokens"),
        ("spinbutton", "Temperature"),
        ("spinbutton", "Top-k"),
        ("region", "Generated text"),
    ):
        assert part in parts
    named = [name for role, name in parts if role == "button"]
    assert [name.split()[0] for name in named] == ["Generate", "Stop"]
    assert "status" in [role for role, _ in parts]
    assert page.evaluate("document.getElementById('output').ariaLive") == "polite"
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_page_fits_and_its_text_can_be_read(chromium, address, dark):
    page = chromium.open(address, width=400, dark=dark)
    page.wait_for(READY)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    pairs = page.evaluate("""
        ["body", "#status", "#generate", "#prompt", "#output"].map((name) => {
          const style = getComputedStyle(document.querySelector(name));
          const body = getComputedStyle(document.body).backgroundColor;
          const none = style.backgroundColor === "rgba(0, 0, 0, 0)";
          return [style.color, none ? body : style.backgroundColor];
        })""")
    for pair in pairs:
        lights = sorted(luminance(color) for color in pair)
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, pair  # WCAG 2.1, AA
    assert (luminance(pairs[0][1]) < 0.5) == dark


def luminance(color: str) -> float:
    """The relative luminance of rgb(r, g, b), as WCAG defines it."""
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").rstrip(")").split(",")]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_is_shown_as_text_and_errors_as_sentences(page):
    fill(page, prompt="<b>bold</b>", length=1)
    page.press("Enter", control=True)
    page.wait_for(f"{IDLE} && {COUNT} === 12")
    assert page.evaluate("document.querySelector('#output b')") is None
    fill(page, prompt="ab⚙")
    page.press("Enter", control=True)
    page.wait_for(f"{STATUS}.startsWith('The character “⚙” (U+2699) is not among the')")
    assert page.evaluate(IDLE)
    fill(page, temperature=-1)
    page.press("Enter", control=True)  # the browser names the field
    assert page.evaluate("document.querySelector(':invalid:not(form)').id") == "temperature"


def test_without_a_prompt_a_text_begins_as_that_of_sample_py(page, model):
    fill(page, length=5, temperature=0)
    page.press("Enter", control=True)
    page.wait_for(f"{IDLE} && {STATUS}.includes(' a second')")
    assert page.evaluate(TEXT) == greedy(model, CHARACTERS.beginning, 5)


def test_a_page_without_its_model_says_so_and_offers_nothing(chromium, model, tmp_path):
    space = space_of(model, tmp_path / "space")
    (space / "model.safetensors").unlink()
    with web_browser.served(space) as address:
        page = chromium.open(address)
        page.wait_for(f"{STATUS} === 'model.safetensors cannot be loaded (HTTP 404).'")
        assert not page.evaluate(IDLE)


@pytest.fixture
def has_gpu(page):
    if not page.evaluate("navigator.gpu?.requestAdapter().then((found) => found !== null)"):
        pytest.skip("this Chromium has no adapter for WebGPU, not even a simulated one")


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize("model", ["gelu", "gelu_new"], indirect=True)
def test_logits_of_the_gpu_are_those_of_the_cpu_to_1e_4(page):
    ids = [(7 * i) % CHARACTERS.vocab_size for i in range(CONTEXT)]
    difference, spread = page.evaluate(f"""(async () => {{ {MODULES}
        const tensors = await weights();
        const gpu = await findDevice(true);
        const models = [await GPT2OnGPU.open(gpu, config, tensors), new GPT2(config, tensors)];
        let [difference, spread] = [0, 0];
        const compare = async (ids, past) => {{
          const [one, other] = await Promise.all(models.map((model) => model.forward(ids, past)));
          one.forEach((logit, token) => {{
            difference = Math.max(difference, Math.abs(logit - other[token]));
            spread = Math.max(spread, Math.abs(logit));
          }});
        }};
        const ids = {json.dumps(ids)};
        await compare(ids, 0);
        await compare(ids.slice(0, 3), 0);
        for (let past = 3; past < ids.length; past++) await compare([ids[past]], past);
        gpu.destroy();
        return [difference, spread];
    }})()""")
    assert spread > 0.5
    assert difference / spread < 1e-4


@pytest.mark.usefixtures("has_gpu")
def test_greedy_text_of_the_gpu_is_that_of_sample_py(page, model, address):
    page.go_to(f"{address}?device=gpu")
    page.wait_for(READY)
    fill(page, prompt="abc", length=CONTEXT + 3, temperature=0)  # a simulated one is slow
    page.press("Enter", control=True)
    page.wait_for(f"{STATUS}.endsWith(' a second, on the GPU.')")
    assert page.evaluate(TEXT) == greedy(model, "abc", CONTEXT + 3)


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize("after", [1, CONTEXT], ids=["cached", "full context"])
def test_a_gpu_that_is_lost_changes_nothing_of_the_text(page, model, after):
    ids = CHARACTERS.encode("abc").tolist()
    before, found, end = page.evaluate(f"""(async () => {{ {MODULES}
        const model = await Model.open(config, weights, "gpu");
        const options = {{ length: {CONTEXT + 6}, temperature: 0, vocabSize: config.vocab_size }};
        const [before, found] = [model.device, []];
        for await (const token of generate(model, {ids}, options)) {{
          found.push(token);
          if (found.length === {after}) model.inner.gpu.destroy();
        }}
        return [before, found, model.device];
    }})()""")
    assert (before, end) == ("GPU", "CPU")
    assert "abc" + CHARACTERS.decode(found) == greedy(model, "abc", CONTEXT + 6)


def test_a_slow_simulated_gpu_is_used_only_when_asked_for(page):
    assert page.evaluate(STATUS).endswith(", on the CPU.")
