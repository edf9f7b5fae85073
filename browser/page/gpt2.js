/**
 * GPT-2 (Radford et al., 2019) on the CPU: float32 weights, sums in JavaScript's float64.
 *
 * Letters in shapes: T time (new positions), P past positions, C channels (n_embd), H heads,
 * D = C / H, V vocabulary. A matrix is a Float32Array, row by row.
 */

import { gelu, geluTanh, layerNorm, linear, product, transposed } from "./arithmetic.js";

/** By the name of the activation in config.json. */
const ACTIVATIONS = { gelu, gelu_new: geluTanh };

export class GPT2 {
  /** How a page calls where this computes. */
  device = "CPU";

  /**
   * @param {object} config the content of config.json
   * @param {Map<string, {shape: number[], values: Float32Array}>} tensors by GPT-2's names
   */
  constructor(config, tensors) {
    this.config = config;
    this.activation = ACTIVATIONS[config.activation_function];
    this.embedding = valuesOf(tensors, "wte.weight"); // (V, C), also the output layer
    this.positions = valuesOf(tensors, "wpe.weight"); // (n_positions, C)
    this.finalNorm = normOf(tensors, "ln_f");
    this.blocks = Array.from({ length: config.n_layer }, (_, layer) => ({
      attentionNorm: normOf(tensors, `h.${layer}.ln_1`),
      attention: projectionOf(tensors, `h.${layer}.attn.c_attn`),
      attentionOut: projectionOf(tensors, `h.${layer}.attn.c_proj`),
      mlpNorm: normOf(tensors, `h.${layer}.ln_2`),
      mlp: projectionOf(tensors, `h.${layer}.mlp.c_fc`),
      mlpOut: projectionOf(tensors, `h.${layer}.mlp.c_proj`),
      // Query, key and value (3C) of every position so far: the cache.
      cache: new Float32Array(config.n_positions * 3 * config.n_embd),
    }));
  }

  /**
   * The logits (V) of the token after `ids`.
   *
   * @param {number[]} ids T tokens, at positions from `past` on; P + T is at most n_positions
   * @param {number} past P, positions whose keys and values earlier calls have computed
   * @returns {Promise<Float32Array>}
   */
  async forward(ids, past) {
    const width = this.config.n_embd;
    let x = this.embed(ids, past); // (T, C)
    this.blocks.forEach((block, layer) => {
      const isLast = layer === this.blocks.length - 1;
      x = this.block(block, x, past, isLast);
    });
    const normed = layerNorm(x, width, this.finalNorm, this.config.layer_norm_epsilon); // (1, C)
    return linear(normed, { weight: this.embedding, outputs: this.config.vocab_size });
  }

  /** Token and position embeddings (T, C). */
  embed(ids, past) {
    const width = this.config.n_embd;
    const x = new Float32Array(ids.length * width);
    ids.forEach((id, time) => {
      for (let c = 0; c < width; c++) {
        const position = this.positions[(past + time) * width + c];
        x[time * width + c] = this.embedding[id * width + c] + position;
      }
    });
    return x;
  }

  /**
   * One pre-norm block: (T, C) to (T, C). The last block, with `isLast`, returns the last position
   * alone (1, C): the others would only be keys and values of a further block.
   */
  block(block, x, past, isLast) {
    const { n_embd: width, layer_norm_epsilon: epsilon } = this.config;
    const projected = linear(layerNorm(x, width, block.attentionNorm, epsilon), block.attention);
    block.cache.set(projected, past * 3 * width); // (T, 3C)
    const times = x.length / width;
    const first = isLast ? times - 1 : 0;
    const y = x.slice(first * width);
    const mixed = this.attend(block.cache, past + first, past + times);
    add(y, linear(mixed, block.attentionOut));
    const hidden = linear(layerNorm(y, width, block.mlpNorm, epsilon), block.mlp); // (T, 4C)
    for (let i = 0; i < hidden.length; i++) hidden[i] = this.activation(hidden[i]);
    add(y, linear(hidden, block.mlpOut));
    return y;
  }

  /**
   * Causal attention of the positions from `first` up to `end`, each to itself and all earlier
   * ones: (end - first, C), from the cache (P + T, 3C).
   */
  attend(cache, first, end) {
    const { n_embd: width, n_head: heads } = this.config;
    const size = width / heads;
    const mixed = new Float32Array((end - first) * width);
    const weights = new Float32Array(end);
    for (let position = first; position < end; position++) {
      for (let head = 0; head < heads; head++) {
        const place = head * size;
        attentionWeights(cache, width, position, place, size, weights);
        const out = (position - first) * width + place;
        for (let past = 0; past <= position; past++) {
          const value = past * 3 * width + 2 * width + place;
          const weight = weights[past];
          for (let d = 0; d < size; d++) mixed[out + d] += weight * cache[value + d];
        }
      }
    }
    return mixed;
  }
}

/** The softmax over the positions up to `position` of one head's scores, into `weights`. */
function attentionWeights(cache, width, position, place, size, weights) {
  const query = position * 3 * width + place;
  let largest = -Infinity;
  for (let past = 0; past <= position; past++) {
    const key = past * 3 * width + width + place;
    weights[past] = product(cache, query, cache, key, size) / Math.sqrt(size);
    largest = Math.max(largest, weights[past]);
  }
  let sum = 0;
  for (let past = 0; past <= position; past++) {
    weights[past] = Math.exp(weights[past] - largest);
    sum += weights[past];
  }
  for (let past = 0; past <= position; past++) weights[past] /= sum;
}

/** Add `more` to `x`, of the same length. */
function add(x, more) {
  for (let i = 0; i < x.length; i++) x[i] += more[i];
}

function valuesOf(tensors, name) {
  const tensor = tensors.get(`transformer.${name}`);
  if (tensor === undefined) throw new Error(`The weights lack ${name}.`);
  return tensor.values;
}

function normOf(tensors, name) {
  return { weight: valuesOf(tensors, `${name}.weight`), bias: valuesOf(tensors, `${name}.bias`) };
}

/** A projection; GPT-2's files have it as (inputs, outputs), `linear` takes the transpose. */
function projectionOf(tensors, name) {
  const bias = valuesOf(tensors, `${name}.bias`);
  return { weight: transposed(valuesOf(tensors, `${name}.weight`), bias.length), bias };
}
