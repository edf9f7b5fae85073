/**
 * Reader of safetensors files: 8 bytes with the length of the header, the header as JSON, the
 * tensors. https://huggingface.co/docs/safetensors
 */

const LENGTH_BYTES = 8;

/**
 * The tensors of a file, by name: `{shape, values}`, where `values` is a Float32Array on the bytes
 * of the file, row by row.
 *
 * @param {ArrayBuffer} buffer the whole file
 * @returns {Map<string, {shape: number[], values: Float32Array}>}
 * @throws {Error} if the file is cut off, or a tensor is not float32
 */
export function readSafetensors(buffer) {
  const header = readHeader(buffer);
  const begin = LENGTH_BYTES + header.bytes;
  const tensors = new Map();
  for (const [name, { dtype, shape, data_offsets: offsets }] of header.entries) {
    if (dtype !== "F32") throw new Error(`${name} is ${dtype}, and this page reads float32.`);
    const count = shape.reduce((product, size) => product * size, 1);
    if (offsets[1] - offsets[0] !== 4 * count || begin + offsets[1] > buffer.byteLength) {
      throw new Error(`${name} is cut off.`);
    }
    tensors.set(name, { shape, values: floats(buffer, begin + offsets[0], count) });
  }
  return tensors;
}

function readHeader(buffer) {
  const missing = new Error("The file with the weights is cut off.");
  if (buffer.byteLength < LENGTH_BYTES) throw missing;
  const bytes = Number(new DataView(buffer).getBigUint64(0, true));
  if (LENGTH_BYTES + bytes > buffer.byteLength) throw missing;
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, LENGTH_BYTES, bytes)));
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  return { bytes, entries };
}

/** A view of the bytes, or a copy where they are not aligned to 4, which a view must be. */
function floats(buffer, begin, count) {
  if (begin % 4 === 0) return new Float32Array(buffer, begin, count);
  return new Float32Array(buffer.slice(begin, begin + 4 * count));
}
