/** The functions that GPT-2 consists of, on Float32Arrays. N: rows, I: inputs, O: outputs. */

/**
 * Rows (N, I) times the transpose of a weight (O, I), plus a bias (O) if there is one: (N, O).
 *
 * @param {Float32Array} x
 * @param {{weight: Float32Array, bias?: Float32Array, outputs?: number}} layer
 *   `outputs` is needed without a bias
 * @returns {Float32Array}
 */
export function linear(x, { weight, bias, outputs = bias.length }) {
  const inputs = weight.length / outputs;
  const rows = x.length / inputs;
  const y = new Float32Array(rows * outputs);
  const inFours = outputs - (outputs % 4);
  for (let output = 0; output < inFours; output += 4) {
    let row = 0;
    for (; row + 1 < rows; row += 2) twoRows(x, row, weight, output, inputs, outputs, y);
    if (row < rows) oneRow(x, row, weight, output, inputs, outputs, y);
  }
  for (let row = 0; row < rows; row++) {
    for (let output = inFours; output < outputs; output++) {
      y[row * outputs + output] = product(x, row * inputs, weight, output * inputs, inputs);
    }
    if (bias) for (let i = 0; i < outputs; i++) y[row * outputs + i] += bias[i];
  }
  return y;
}

/** Four outputs of a row: independent sums, which a processor computes at the same time. */
function oneRow(x, row, weight, output, inputs, outputs, y) {
  const [xAt, weightAt, yAt] = [row * inputs, output * inputs, row * outputs + output];
  let a = 0, b = 0, c = 0, d = 0;
  for (let i = 0; i < inputs; i++) {
    const one = x[xAt + i];
    const at = weightAt + i;
    a += one * weight[at];
    b += one * weight[at + inputs];
    c += one * weight[at + 2 * inputs];
    d += one * weight[at + 3 * inputs];
  }
  y[yAt] = a;
  y[yAt + 1] = b;
  y[yAt + 2] = c;
  y[yAt + 3] = d;
}

/** Four outputs of two rows, for which each weight is loaded once: 1.5 times as fast. */
function twoRows(x, row, weight, output, inputs, outputs, y) {
  const [xAt, weightAt, yAt] = [row * inputs, output * inputs, row * outputs + output];
  let a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
  for (let i = 0; i < inputs; i++) {
    const at = weightAt + i;
    const first = weight[at];
    const second = weight[at + inputs];
    const third = weight[at + 2 * inputs];
    const fourth = weight[at + 3 * inputs];
    const one = x[xAt + i];
    const two = x[xAt + inputs + i];
    a += one * first;
    b += one * second;
    c += one * third;
    d += one * fourth;
    e += two * first;
    f += two * second;
    g += two * third;
    h += two * fourth;
  }
  y[yAt] = a;
  y[yAt + 1] = b;
  y[yAt + 2] = c;
  y[yAt + 3] = d;
  y[yAt + outputs] = e;
  y[yAt + outputs + 1] = f;
  y[yAt + outputs + 2] = g;
  y[yAt + outputs + 3] = h;
}

/** The scalar product of stretches of two arrays, of the same length. */
export function product(x, xAt, y, yAt, length) {
  let sum = 0;
  for (let i = 0; i < length; i++) sum += x[xAt + i] * y[yAt + i];
  return sum;
}

/**
 * Each row (N, C) with mean 0 and variance 1, then scaled and shifted: (N, C).
 *
 * @param {Float32Array} x
 * @param {number} width C
 * @param {{weight: Float32Array, bias: Float32Array}} norm
 * @param {number} epsilon
 */
export function layerNorm(x, width, { weight, bias }, epsilon) {
  const y = new Float32Array(x.length);
  for (let row = 0; row < x.length; row += width) {
    let mean = 0;
    for (let c = 0; c < width; c++) mean += x[row + c] / width;
    let variance = 0;
    for (let c = 0; c < width; c++) variance += (x[row + c] - mean) ** 2 / width;
    const scale = 1 / Math.sqrt(variance + epsilon);
    for (let c = 0; c < width; c++) {
      y[row + c] = (x[row + c] - mean) * scale * weight[c] + bias[c];
    }
  }
  return y;
}

/** The exact GELU of a number (Hendrycks and Gimpel, 2016), to 1e-6. */
export function gelu(x) {
  return 0.5 * x * (1 + erf(x / Math.SQRT2));
}

/** GPT-2's approximation of the GELU, transformers' `gelu_new`. */
export function geluTanh(x) {
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

/** The error function to 1.5e-7: Abramowitz and Stegun, 7.1.26. */
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const coefficients = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592];
  const sum = coefficients.reduce((total, coefficient) => total * t + coefficient, 0) * t;
  return Math.sign(x) * (1 - sum * Math.exp(-x * x));
}

/** The transpose of a matrix with so many columns. */
export function transposed(matrix, columns) {
  const rows = matrix.length / columns;
  const result = new Float32Array(matrix.length);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      result[column * rows + row] = matrix[row * columns + column];
    }
  }
  return result;
}
