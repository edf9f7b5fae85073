/**
 * GPT-2 on a GPU, in float32: the same interface as GPT2 in gpt2.js.
 *
 * Letters in shapes: T time (new positions), P past positions, C channels (n_embd), V vocabulary.
 * All buffers are made once, for n_positions rows, and so is the list of kernels of a forward pass;
 * a pass writes P, T and the tokens, and runs the list. The kernels: kernels.js.
 */

import { KERNELS, LARGEST_CONTEXT, THREADS } from "./kernels.js";

const FLOAT_BYTES = 4;

/**
 * The GPU of this browser, or null if it has none.
 *
 * @param {boolean} orSoftware whether one that is simulated, slower than the CPU model, will do
 * @returns {Promise<GPUDevice | null>}
 */
export async function findDevice(orSoftware) {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter();
  if (!adapter || (adapter.info?.isFallbackAdapter && !orSoftware)) return null;
  const { maxBufferSize, maxStorageBufferBindingSize } = adapter.limits;
  return adapter.requestDevice({ requiredLimits: { maxBufferSize, maxStorageBufferBindingSize } });
}

export class GPT2OnGPU {
  device = "GPU";

  /**
   * Raises an Error if the GPU refuses a buffer or a kernel.
   *
   * @param {GPUDevice} gpu
   * @param {object} config the content of config.json
   * @param {Map<string, {shape: number[], values: Float32Array}>} tensors by GPT-2's names
   */
  static async open(gpu, config, tensors) {
    if (config.n_positions > LARGEST_CONTEXT) throw new Error("The context is too long.");
    const scopes = ["out-of-memory", "validation"];
    scopes.forEach((scope) => gpu.pushErrorScope(scope));
    const model = new GPT2OnGPU(gpu, config, tensors);
    for (const _ of scopes) {
      const error = await gpu.popErrorScope();
      if (error) throw new Error(error.message);
    }
    return model;
  }

  constructor(gpu, config, tensors) {
    this.gpu = gpu;
    this.config = config;
    this.weights = new Map([...tensors].map(([name, one]) => [name, this.upload(one.values)]));
    const { n_embd: width, n_positions: rows, vocab_size: vocabulary } = config;
    this.place = this.buffer(2, GPUBufferUsage.UNIFORM); // P and T
    this.tokens = this.buffer(rows);
    this.x = this.buffer(rows * width); // the residual stream (T, C)
    this.normed = this.buffer(rows * width);
    this.mixed = this.buffer(rows * width);
    this.hidden = this.buffer(rows * 4 * width);
    this.logits = this.buffer(vocabulary);
    this.readable = gpu.createBuffer({
      size: vocabulary * FLOAT_BYTES,
      usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
    });
    this.pipelines = new Map();
    this.steps = this.listSteps();
    this.weights.clear(); // the steps hold the buffers
  }

  /** As GPT2.forward. Rejects if the GPU is lost. */
  async forward(ids, past) {
    const { queue } = this.gpu;
    queue.writeBuffer(this.place, 0, Uint32Array.of(past, ids.length));
    queue.writeBuffer(this.tokens, 0, Uint32Array.from(ids));
    const encoder = this.gpu.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (const { pipeline, group, workgroups } of this.steps) {
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...workgroups(ids.length));
    }
    pass.end();
    encoder.copyBufferToBuffer(this.logits, 0, this.readable, 0, this.readable.size);
    queue.submit([encoder.finish()]);
    await this.readable.mapAsync(GPUMapMode.READ);
    const logits = new Float32Array(this.readable.getMappedRange().slice(0));
    this.readable.unmap();
    return logits;
  }

  /** The kernels of a forward pass, in order. */
  listSteps() {
    const { n_layer: layers, n_embd: width, n_positions: rows, n_head: heads } = this.config;
    const gelu = this.config.activation_function === "gelu" ? 1 : 2;
    const embed = [this.tokens, this.weight("wte.weight"), this.weight("wpe.weight"), this.x];
    const steps = [this.step("embed", { WIDTH: width }, embed, (times) => [times])];
    for (let layer = 0; layer < layers; layer++) {
      const cache = this.buffer(rows * 3 * width); // query, key and value of every position
      const block = `h.${layer}`;
      steps.push(
        this.norm(`${block}.ln_1`),
        this.linear(this.normed, `${block}.attn.c_attn`, cache, width, 3 * width, { CACHE: 1 }),
        this.step("attend", { WIDTH: width, HEADS: heads }, [cache, this.mixed], (times) => [
          heads,
          times,
        ]),
        this.linear(this.mixed, `${block}.attn.c_proj`, this.x, width, width, { ADD: 1 }),
        this.norm(`${block}.ln_2`),
        this.linear(this.normed, `${block}.mlp.c_fc`, this.hidden, width, 4 * width, {
          GELU: gelu,
        }),
        this.linear(this.hidden, `${block}.mlp.c_proj`, this.x, 4 * width, width, { ADD: 1 }),
      );
    }
    return [...steps, this.norm("ln_f"), this.head()];
  }

  /** The output layer, of the last position alone. */
  head() {
    const { n_embd: width, vocab_size: vocabulary } = this.config;
    const constants = { INPUTS: width, OUTPUTS: vocabulary };
    const buffers = [this.normed, this.weight("wte.weight"), this.logits];
    return this.step("head", constants, buffers, () => [Math.ceil(vocabulary / THREADS)]);
  }

  norm(name) {
    const buffers = [this.x, this.weight(`${name}.weight`), this.weight(`${name}.bias`)];
    const constants = { WIDTH: this.config.n_embd, EPSILON: this.config.layer_norm_epsilon };
    return this.step("norm", constants, [...buffers, this.normed], (times) => [times]);
  }

  /** A projection of x (T, inputs) into y (T, outputs); `options` are constants of the kernel. */
  linear(x, name, y, inputs, outputs, options) {
    const buffers = [x, this.weight(`${name}.weight`), this.weight(`${name}.bias`), y];
    const constants = { INPUTS: inputs, OUTPUTS: outputs, ...options };
    return this.step("linear", constants, buffers, (times) => [
      Math.ceil(outputs / THREADS),
      times,
    ]);
  }

  /** One kernel with its buffers; `workgroups` gives their number for T positions. */
  step(kernel, constants, buffers, workgroups) {
    const layout = this.layout(buffers.length);
    const key = JSON.stringify([kernel, constants]);
    if (!this.pipelines.has(key)) {
      const module = this.gpu.createShaderModule({ code: KERNELS[kernel] });
      const compute = { module, constants };
      const pipelineLayout = this.gpu.createPipelineLayout({ bindGroupLayouts: [layout] });
      const pipeline = this.gpu.createComputePipeline({ layout: pipelineLayout, compute });
      this.pipelines.set(key, pipeline);
    }
    const entries = [this.place, ...buffers].map((buffer, binding) => ({
      binding,
      resource: { buffer },
    }));
    const group = this.gpu.createBindGroup({ layout, entries });
    return { pipeline: this.pipelines.get(key), group, workgroups };
  }

  /** What a kernel takes: P and T, buffers that it reads, and the last one, which it writes. */
  layout(count) {
    const types = ["uniform", ...Array(count - 1).fill("read-only-storage"), "storage"];
    const entries = types.map((type, binding) => ({
      binding,
      visibility: GPUShaderStage.COMPUTE,
      buffer: { type },
    }));
    return this.gpu.createBindGroupLayout({ entries });
  }

  weight(name) {
    return this.weights.get(`transformer.${name}`);
  }

  upload(values) {
    const buffer = this.buffer(values.length);
    this.gpu.queue.writeBuffer(buffer, 0, values);
    return buffer;
  }

  /** A buffer of so many numbers of 4 bytes. */
  buffer(count, usage = GPUBufferUsage.STORAGE) {
    const copies = GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC;
    return this.gpu.createBuffer({ size: count * FLOAT_BYTES, usage: usage | copies });
  }
}
