/**
 * The kernels of GPT-2 in WGSL. Binding 0 is always P and T, the past and the new positions; the
 * buffers follow in the order in which a kernel declares them, the result last.
 */

/** Threads of a workgroup. */
export const THREADS = 64;
/** Scores of a whole context are in the memory of a workgroup, of which WebGPU promises 16 KiB. */
export const LARGEST_CONTEXT = 3072;

const PLACE = `
struct Place { past: u32, times: u32 }
@group(0) @binding(0) var<uniform> place: Place;
`;

/** Token and position embeddings, a workgroup for each position: (T, C). */
const EMBED = `${PLACE}
override WIDTH: u32;
@group(0) @binding(1) var<storage, read> tokens: array<u32>;
@group(0) @binding(2) var<storage, read> embedding: array<f32>;
@group(0) @binding(3) var<storage, read> positions: array<f32>;
@group(0) @binding(4) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(${THREADS})
fn main(@builtin(workgroup_id) row: vec3u, @builtin(local_invocation_index) thread: u32) {
  let time = row.x;
  for (var c = thread; c < WIDTH; c += ${THREADS}u) {
    let position = positions[(place.past + time) * WIDTH + c];
    x[time * WIDTH + c] = embedding[tokens[time] * WIDTH + c] + position;
  }
}`;

/** LayerNorm, a workgroup for each row: (T, C) to (T, C). */
const NORM = `
override WIDTH: u32;
override EPSILON: f32;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
var<workgroup> parts: array<f32, ${THREADS}>;

fn sum_of_all(part: f32, thread: u32) -> f32 {
  workgroupBarrier();
  parts[thread] = part;
  workgroupBarrier();
  var sum = 0.0;
  for (var i = 0u; i < ${THREADS}u; i++) { sum += parts[i]; }
  return sum;
}

@compute @workgroup_size(${THREADS})
fn main(@builtin(workgroup_id) row: vec3u, @builtin(local_invocation_index) thread: u32) {
  let begin = row.x * WIDTH;
  var part = 0.0;
  for (var c = thread; c < WIDTH; c += ${THREADS}u) { part += x[begin + c]; }
  let mean = sum_of_all(part, thread) / f32(WIDTH);
  part = 0.0;
  for (var c = thread; c < WIDTH; c += ${THREADS}u) {
    part += (x[begin + c] - mean) * (x[begin + c] - mean);
  }
  let scale = inverseSqrt(sum_of_all(part, thread) / f32(WIDTH) + EPSILON);
  for (var c = thread; c < WIDTH; c += ${THREADS}u) {
    y[begin + c] = (x[begin + c] - mean) * scale * weight[c] + bias[c];
  }
}`;

/**
 * A projection, a thread for each output of each row: (T, I) times (I, O) plus (O), to (T, O).
 *
 * CACHE: the rows of y begin at position P. ADD: y is added to. GELU: 1 exact, 2 GPT-2's own.
 */
const LINEAR = `${PLACE}
override INPUTS: u32;
override OUTPUTS: u32;
override CACHE: u32 = 0;
override ADD: u32 = 0;
override GELU: u32 = 0;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

// Abramowitz and Stegun, 7.1.26, as in arithmetic.js.
fn erf(x: f32) -> f32 {
  let t = 1.0 / (1.0 + 0.3275911 * abs(x));
  let sum = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
    + 0.254829592) * t;
  return sign(x) * (1.0 - sum * exp(-x * x));
}

fn activated(x: f32) -> f32 {
  if (GELU == 1) { return 0.5 * x * (1.0 + erf(x * 0.70710678)); }
  if (GELU == 2) {
    // Beyond 10 tanh is 1, and some GPUs overflow.
    return 0.5 * x * (1.0 + tanh(clamp(0.79788456 * (x + 0.044715 * x * x * x), -10.0, 10.0)));
  }
  return x;
}

@compute @workgroup_size(${THREADS})
fn main(@builtin(global_invocation_id) at: vec3u) {
  let output = at.x;
  if (output >= OUTPUTS) { return; }
  var sum = bias[output];
  for (var i = 0u; i < INPUTS; i++) {
    sum += x[at.y * INPUTS + i] * weight[i * OUTPUTS + output];
  }
  let row = at.y + CACHE * place.past;
  let before = f32(ADD) * y[row * OUTPUTS + output];
  y[row * OUTPUTS + output] = before + activated(sum);
}`;

/** Causal attention, a workgroup for each head of each row: from the cache (P + T, 3C) to (T, C). */
const ATTEND = `${PLACE}
override WIDTH: u32;
override HEADS: u32;
@group(0) @binding(1) var<storage, read> cache: array<f32>;
@group(0) @binding(2) var<storage, read_write> mixed: array<f32>;
var<workgroup> scores: array<f32, ${LARGEST_CONTEXT}>;

@compute @workgroup_size(${THREADS})
fn main(@builtin(workgroup_id) at: vec3u, @builtin(local_invocation_index) thread: u32) {
  let size = WIDTH / HEADS;
  let first = at.x * size;
  let position = place.past + at.y;
  for (var past = thread; past <= position; past += ${THREADS}u) {
    var score = 0.0;
    for (var d = first; d < first + size; d++) {
      score += cache[position * 3 * WIDTH + d] * cache[past * 3 * WIDTH + WIDTH + d];
    }
    scores[past] = score * inverseSqrt(f32(size));
  }
  workgroupBarrier();
  var largest = scores[0];
  for (var past = 1u; past <= position; past++) { largest = max(largest, scores[past]); }
  workgroupBarrier();
  for (var past = thread; past <= position; past += ${THREADS}u) {
    scores[past] = exp(scores[past] - largest);
  }
  workgroupBarrier();
  for (var d = first + thread; d < first + size; d += ${THREADS}u) {
    var sum = 0.0;
    var value = 0.0;
    for (var past = 0u; past <= position; past++) {
      sum += scores[past];
      value += scores[past] * cache[past * 3 * WIDTH + 2 * WIDTH + d];
    }
    mixed[at.y * WIDTH + d] = value / sum;
  }
}`;

/** The output layer, a thread for each token: the last row of (T, I) times (O, I), to (O). */
const HEAD = `${PLACE}
override INPUTS: u32;
override OUTPUTS: u32;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> embedding: array<f32>;
@group(0) @binding(3) var<storage, read_write> logits: array<f32>;

@compute @workgroup_size(${THREADS})
fn main(@builtin(global_invocation_id) at: vec3u) {
  if (at.x >= OUTPUTS) { return; }
  let row = (place.times - 1) * INPUTS;
  var sum = 0.0;
  for (var i = 0u; i < INPUTS; i++) { sum += x[row + i] * embedding[at.x * INPUTS + i]; }
  logits[at.x] = sum;
}`;

/** By name. */
export const KERNELS = {
  embed: EMBED,
  norm: NORM,
  linear: LINEAR,
  attend: ATTEND,
  head: HEAD,
};
