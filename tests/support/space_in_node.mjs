/**
 * The modules of a Space in node: node tests/support/space_in_node.mjs FOLDER < calls > answers
 *
 * The input is a JSON list of calls, each a name of `calls` and its arguments; the output is the
 * list of what they return, or of `{error}` with the message.
 */

import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const folder = pathToFileURL(`${resolve(process.argv[2])}/`);
const load = (name) => import(new URL(name, folder));
const read = (name) => readFileSync(new URL(name, folder));
const [{ GPT2 }, { generate }, { draw, probabilities }, { readSafetensors }, tokenizers] =
  await Promise.all(
    ["gpt2.js", "generate.js", "sampling.js", "safetensors.js", "tokenizer.js"].map(load),
  );
const space = JSON.parse(read("space.json"));
const tokenizer = tokenizers.openTokenizer(JSON.parse(read("tokenizer.json")));

function openModel() {
  const tensors = new Map();
  for (const name of space.weights) {
    const { buffer, byteOffset, byteLength } = read(name);
    const content = buffer.slice(byteOffset, byteOffset + byteLength);
    for (const [tensor, one] of readSafetensors(content)) tensors.set(tensor, one);
  }
  return new GPT2(JSON.parse(read("config.json")), tensors);
}

let opened;
const model = () => (opened ??= openModel());

const calls = {
  /** Logits after the tokens, computed at once, and one token at a time. */
  async logits(ids) {
    const whole = await model().forward(ids, 0);
    let cached;
    for (let past = 0; past < ids.length; past++) cached = await model().forward([ids[past]], past);
    return [[...whole], [...cached]];
  },
  async tokens(prompt, options) {
    const found = [];
    const all = { ...options, vocabSize: tokenizer.vocabSize, endOfText: space.end_of_text };
    for await (const token of generate(model(), prompt, all)) found.push(token);
    return found;
  },
  /** Tokens a second of greedy text. */
  async speed(prompt, length) {
    const started = performance.now();
    const tokens = await calls.tokens(prompt, { length, temperature: 0 });
    return tokens.length / ((performance.now() - started) / 1000);
  },
  encode: (text) => tokenizer.encode(text),
  decode: (ids) => tokenizers.decode(tokenizer, ids),
  vocabSize: () => tokenizer.vocabSize,
  probabilities: (logits, options) => [...probabilities(Float32Array.from(logits), options)],
  draw: (chances, random) => draw(Float32Array.from(chances), random),
};

const answers = [];
for (const [name, ...given] of JSON.parse(readFileSync(0, "utf-8"))) {
  try {
    answers.push(await calls[name](...given));
  } catch (error) {
    answers.push({ error: error.message });
  }
}
console.log(JSON.stringify(answers));
