/** The files of a Space. All lie in one folder, and nothing else is requested. */

import { readSafetensors } from "./safetensors.js";
import { openTokenizer } from "./tokenizer.js";

/**
 * What the page shows, and what the model needs besides its weights.
 *
 * @param {URL} folder
 */
export async function readSpace(folder) {
  const names = ["space.json", "config.json", "tokenizer.json"];
  const [space, config, tokenizer] = await Promise.all(
    names.map(async (name) => (await request(folder, name)).json()),
  );
  return { space, config, tokenizer: openTokenizer(tokenizer) };
}

/**
 * The weights, from one file or several.
 *
 * @param {URL} folder
 * @param {string[]} names
 */
export async function readWeights(folder, names) {
  const tensors = new Map();
  for (const name of names) {
    const buffer = await (await request(folder, name)).arrayBuffer();
    for (const [tensor, content] of readSafetensors(buffer)) tensors.set(tensor, content);
  }
  return tensors;
}

async function request(folder, name) {
  const response = await fetch(new URL(name, folder));
  if (!response.ok) throw new Error(`${name} cannot be loaded (HTTP ${response.status}).`);
  return response;
}
