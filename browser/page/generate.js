/** Text generation: one token at a time. */

import { draw, probabilities } from "./sampling.js";

/**
 * Yield the tokens that follow a prompt, as they are drawn.
 *
 * While there are fewer than n_positions tokens, each costs a forward pass of one position. Later
 * the window slides: the model sees the last n_positions tokens. Learned positions shift with the
 * window, so each token then costs a forward pass of a full window.
 *
 * @param {object} model with `config` and `forward(ids, past)`, such as GPT2
 * @param {number[]} prompt at least one token
 * @param {{length: number, temperature: number, topK?: number, vocabSize: number,
 *   endOfText?: number | null}} options `length` tokens at most; only those below `vocabSize` are
 *   drawn, as an embedding may have more rows; `endOfText` ends the text, and is not yielded
 * @param {() => number} random uniform, from 0 to below 1
 * @throws {Error} if logits are not finite
 */
export async function* generate(model, prompt, options, random = Math.random) {
  const context = model.config.n_positions;
  let text = prompt.slice(-context);
  let logits = await model.forward(text, 0);
  for (let count = 0; count < options.length; count++) {
    if (!logits.every(Number.isFinite)) {
      throw new Error("The model's logits are not finite: its weights are damaged, or too large.");
    }
    const chances = probabilities(logits.subarray(0, options.vocabSize), options);
    const token = draw(chances, random());
    if (token === options.endOfText) return;
    yield token;
    if (count + 1 === options.length) return;
    const isFull = text.length === context;
    text = [...(isFull ? text.slice(1) : text), token];
    logits = await (isFull ? model.forward(text, 0) : model.forward([token], text.length - 1));
  }
}
