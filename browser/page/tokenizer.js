/** Text to tokens and back, from a tokenizer.json: of characters, or byte-level BPE. */

/**
 * The tokenizer of a tokenizer.json.
 *
 * @param {object} content the parsed file
 * @returns {CharacterTokenizer | ByteLevelTokenizer}
 */
export function openTokenizer(content) {
  const { model } = content;
  if (model.type === "WordLevel") return new CharacterTokenizer(model.vocab);
  return new ByteLevelTokenizer(model, content.added_tokens ?? []);
}

/** One token for each code point of the training text. */
class CharacterTokenizer {
  /** @param {Object<string, number>} vocabulary */
  constructor(vocabulary) {
    this.tokenOf = new Map(Object.entries(vocabulary));
    this.texts = textsByToken(this.tokenOf);
  }

  get vocabSize() {
    return this.texts.length;
  }

  /**
   * @param {string} text
   * @returns {number[]}
   * @throws {Error} that names the first character which the vocabulary lacks
   */
  encode(text) {
    return Array.from(text, (character) => {
      const token = this.tokenOf.get(character);
      if (token !== undefined) return token;
      const number = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      throw new Error(
        `The character “${character}” (U+${number}) is not among the ${this.vocabSize} ` +
          "characters of the training text. Leave it out.",
      );
    });
  }

  /** A function from each next token to its text; without a token, to what is left at the end. */
  decoder() {
    return (token) => (token === undefined ? "" : this.texts[token]);
  }
}

/** Words of GPT-2, as its own expression has them; `\s` of JavaScript is not Unicode's. */
const WORDS = new RegExp(
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\p{White_Space}\\p{L}\\p{N}]+|" +
    "\\p{White_Space}+(?!\\P{White_Space})|\\p{White_Space}+",
  "gu",
);
/** Words whose tokens are kept. */
const MOST_WORDS = 10_000;

/** Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019): every text has an encoding. */
class ByteLevelTokenizer {
  /**
   * @param {{vocab: Object<string, number>, merges: (string | string[])[]}} model
   * @param {{id: number, content: string}[]} added tokens, which no text is encoded as
   */
  constructor({ vocab, merges }, added) {
    this.tokenOf = new Map(Object.entries(vocab));
    this.texts = textsByToken(this.tokenOf);
    for (const { id, content } of added) this.texts[id] = content;
    this.rankOf = new Map(
      merges.map((pair, rank) => [typeof pair === "string" ? pair : pair.join(" "), rank]),
    );
    this.characterOf = byteCharacters();
    this.byteOf = new Map(this.characterOf.map((character, byte) => [character, byte]));
    this.known = new Map();
  }

  get vocabSize() {
    return this.texts.length;
  }

  /**
   * @param {string} text
   * @returns {number[]}
   */
  encode(text) {
    return (text.match(WORDS) ?? []).flatMap((word) => this.encodeWord(word));
  }

  encodeWord(word) {
    if (!this.known.has(word)) {
      if (this.known.size >= MOST_WORDS) this.known.clear();
      const bytes = new TextEncoder().encode(word);
      const parts = this.merge(Array.from(bytes, (byte) => this.characterOf[byte]));
      this.known.set(word, parts.map((part) => this.tokenOf.get(part)));
    }
    return this.known.get(word);
  }

  /** Join the pair that was learned first, the leftmost of equal ones, until none is left. */
  merge(parts) {
    for (;;) {
      let [best, place] = [Infinity, -1];
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.rankOf.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (rank < best) [best, place] = [rank, i];
      }
      if (place < 0) return parts;
      parts.splice(place, 2, parts[place] + parts[place + 1]);
    }
  }

  /** As CharacterTokenizer.decoder: half of a character waits for its other half. */
  decoder() {
    const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
    return (token) => {
      if (token === undefined) return utf8.decode();
      return utf8.decode(this.bytesOf(this.texts[token] ?? ""), { stream: true });
    };
  }

  bytesOf(text) {
    const bytes = Array.from(text, (character) => this.byteOf.get(character));
    return bytes.includes(undefined) ? new TextEncoder().encode(text) : Uint8Array.from(bytes);
  }
}

/**
 * The text of tokens.
 *
 * @param {CharacterTokenizer | ByteLevelTokenizer} tokenizer
 * @param {number[]} tokens
 */
export function decode(tokenizer, tokens) {
  const decoder = tokenizer.decoder();
  return tokens.map((token) => decoder(token)).join("") + decoder();
}

function textsByToken(tokenOf) {
  const texts = [];
  for (const [text, token] of tokenOf) texts[token] = text;
  return texts;
}

/** The character that stands for each byte: itself if it can be seen, else one from U+0100 on. */
function byteCharacters() {
  let unseen = 0x100;
  return Array.from({ length: 256 }, (_, byte) => {
    const isSeen = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
    return String.fromCharCode(isSeen ? byte : unseen++);
  });
}
