/** The choice of the next token from logits (V). */

/** Smaller temperatures count as 0. */
const SMALLEST = 1e-30;

/**
 * The probabilities (V) of the tokens, after temperature, then top-k.
 *
 * Temperature 0 gives the largest logit (the first of equal ones) probability 1. `topK` keeps the k
 * most likely tokens; of equal ones the first. Without it all are kept.
 *
 * @param {Float32Array} logits
 * @param {{temperature: number, topK?: number}} options
 * @returns {Float32Array}
 */
export function probabilities(logits, { temperature, topK }) {
  const largest = logits.reduce((most, logit) => Math.max(most, logit));
  const result = new Float32Array(logits.length);
  if (temperature < SMALLEST) {
    result[logits.indexOf(largest)] = 1;
    return result;
  }
  const kept = mostLikely(logits, topK ?? logits.length);
  let sum = 0;
  for (const token of kept) {
    result[token] = Math.exp((logits[token] - largest) / temperature);
    sum += result[token];
  }
  for (const token of kept) result[token] /= sum;
  return result;
}

/** The tokens with the k largest logits, of equal ones the first. */
function mostLikely(logits, k) {
  const tokens = [...logits.keys()];
  if (k >= logits.length) return tokens;
  const least = logits.slice().sort()[logits.length - k];
  const above = tokens.filter((token) => logits[token] > least);
  const equal = tokens.filter((token) => logits[token] === least);
  return [...above, ...equal.slice(0, k - above.length)];
}

/**
 * A token, drawn with these probabilities.
 *
 * @param {Float32Array} chances (V), with the sum 1
 * @param {number} random uniform, from 0 to below 1
 */
export function draw(chances, random) {
  let rest = random;
  let last = 0;
  for (let token = 0; token < chances.length; token++) {
    if (chances[token] === 0) continue;
    rest -= chances[token];
    if (rest < 0) return token;
    last = token;
  }
  return last; // the sum was rounded to less than 1
}
