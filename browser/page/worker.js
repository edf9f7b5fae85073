/**
 * The model in a worker, so that the page stays responsive.
 *
 * It takes `{type: "open", device}`, once, `{type: "generate", prompt, options}` and
 * `{type: "stop"}`. It sends `ready` or `broken`, then `text` for each piece of text, and `done` or
 * `error`.
 */

import { readSpace, readWeights } from "./files.js";
import { generate } from "./generate.js";
import { Model } from "./model.js";

const FOLDER = new URL("./", import.meta.url);
/** Milliseconds of text in one message; between two, a message to stop is taken. */
const PIECE_MILLISECONDS = 16;

class Session {
  async open({ device }) {
    const { space, config, tokenizer } = await readSpace(FOLDER);
    this.space = space;
    this.tokenizer = tokenizer;
    this.model = await Model.open(config, () => readWeights(FOLDER, space.weights), device);
    const { parameters, device: found } = this.model;
    postMessage({ type: "ready", space, parameters, device: found });
  }

  /** Generate text until the length is reached, the text ends or `stop` is called. */
  async generate({ prompt, options }) {
    this.isStopped = false;
    const ids = this.tokenizer.encode(prompt);
    const decode = this.tokenizer.decoder();
    const { vocabSize } = this.tokenizer;
    const all = { ...options, vocabSize, endOfText: this.space.end_of_text };
    const started = performance.now();
    let [piece, sent, characters] = ["", started, 0];
    const send = () => {
      characters += Array.from(piece).length;
      postMessage({ type: "text", text: piece });
      [piece, sent] = ["", performance.now()];
    };
    for await (const token of generate(this.model, ids, all)) {
      piece += decode(token);
      if (performance.now() - sent < PIECE_MILLISECONDS) continue;
      send();
      await messagesTaken();
      if (this.isStopped) break;
    }
    piece += decode();
    send();
    const seconds = (performance.now() - started) / 1000;
    postMessage({ type: "done", characters, seconds, device: this.model.device });
  }

  stop() {
    this.isStopped = true;
  }
}

/** A promise that is kept after waiting messages; a timer would wait for 4 ms. */
function messagesTaken() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

const session = new Session();

addEventListener("message", async ({ data }) => {
  try {
    await session[data.type](data);
  } catch (error) {
    postMessage({ type: data.type === "open" ? "broken" : "error", message: error.message });
  }
});
