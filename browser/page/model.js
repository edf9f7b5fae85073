/** The choice of where a model computes: on the GPU if there is one, else on the CPU. */

import { GPT2 } from "./gpt2.js";
import { GPT2OnGPU, findDevice } from "./webgpu.js";

/** A model that continues on the CPU when the GPU fails, in the middle of a text too. */
export class Model {
  /**
   * @param {object} config the content of config.json
   * @param {() => Promise<Map>} readTensors reads the weights, again where the GPU has failed
   * @param {string | null} wanted "cpu", or "gpu" for a simulated one too
   */
  static async open(config, readTensors, wanted) {
    const tensors = await readTensors();
    const model = new Model(config, readTensors);
    const sizes = [...tensors.values()].map(({ values }) => values.length);
    model.parameters = sizes.reduce((sum, size) => sum + size, 0);
    model.inner = await open(config, tensors, wanted);
    return model;
  }

  constructor(config, readTensors) {
    this.config = config;
    this.readTensors = readTensors;
    this.text = [];
  }

  /** Where it computes. */
  get device() {
    return this.inner.device;
  }

  /** As GPT2.forward. */
  async forward(ids, past) {
    this.text = [...this.text.slice(0, past), ...ids];
    try {
      return await this.inner.forward(ids, past);
    } catch (error) {
      if (this.inner instanceof GPT2) throw error;
      this.inner = new GPT2(this.config, await this.readTensors());
      return this.inner.forward(this.text, 0);
    }
  }
}

async function open(config, tensors, wanted) {
  try {
    const gpu = wanted === "cpu" ? null : await findDevice(wanted === "gpu");
    if (gpu !== null) return await GPT2OnGPU.open(gpu, config, tensors);
  } catch (error) {
    console.warn(`The GPU is not used: ${error.message}`);
  }
  return new GPT2(config, tensors);
}
