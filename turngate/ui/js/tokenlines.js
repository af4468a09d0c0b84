/**
 * The tokens of a branch, broken into lines of a given width, so that a windowed list can show any part of a hundred thousand of them.
 * `tabs/tokens.js` draws the lines.
 */

/** @typedef {import("./api.js").Json} Json */

/**
 * @typedef {object} Held a node and the range of its tokens
 * @property {Json} node as the API returns it, without its tokens
 * @property {number} first its first token here
 * @property {number} past one past its last token
 * @property {boolean} folded
 *
 * @typedef {{held: Held, head: boolean, from: number, to: number}} Line `head` marks the line above a node's tokens
 */

const FOLD_FROM = 300; // contexts with more tokens start folded

/** Characters that are two columns wide: East Asian wide characters and most emoji. */
const WIDE =
  /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|[\ud83c-\ud83e][\udc00-\udfff]/g;

export class TokenLines {
  constructor() {
    /** @type {Held[]} */
    this.nodes = [];
    /** @type {number[]} */
    this.ids = [];
    /** @type {string[]} the text shown for each token */
    this.texts = [];
    /** @type {(number | null)[]} */
    this.logprobs = [];
    /** @type {Set<number>} */
    this.special = new Set();
    /** @type {Set<number>} tokens that hold part of a character that another token shows */
    this.parts = new Set();
    /** @type {Line[]} */
    this.lines = [];
    this.columns = 100;
  }

  get count() {
    return this.ids.length;
  }

  /** Add fetched nodes. @param {Json[]} nodes */
  append(nodes) {
    for (const node of nodes) {
      const base = this.ids.length;
      let held = this.nodes[this.nodes.length - 1];
      if (!held || held.node.id !== node.id) {
        const folded = node.kind === "context" && node.tokens > FOLD_FROM;
        held = { node: { ...node, ids: null, text: null, logprobs: null }, first: base, past: base, folded };
        this.nodes.push(held);
      }
      const shown = this.#shown(node, base);
      for (let i = 0; i < node.ids.length; i++) {
        this.ids.push(node.ids[i]);
        this.texts.push(shown[i]);
        this.logprobs.push(node.logprobs ? node.logprobs[i] : null);
      }
      for (const i of node.special ?? []) this.special.add(base + i);
      held.past = this.ids.length;
    }
  }

  /** @param {Json} node @param {number} base @returns {string[]} */
  #shown(node, base) {
    if (!node.text) return node.ids.map((/** @type {number} */ id) => ` ${id}`);
    const shown = node.text.map(
      (/** @type {string | null} */ text, /** @type {number} */ i) => text ?? hex(node.bytes?.[i] ?? ""),
    );
    for (const [first, past, text] of node.runs ?? []) {
      if (text === null) continue;
      shown[first] = text;
      for (let i = first + 1; i < past; i++) {
        shown[i] = " ";
        this.parts.add(base + i);
      }
    }
    return shown;
  }

  /** Break all tokens into lines again. @param {number} columns */
  lay(columns) {
    this.columns = columns;
    this.lines = [];
    for (const held of this.nodes) {
      this.lines.push({ held, head: true, from: held.first, to: held.first });
      if (!held.folded) this.#layNode(held);
    }
  }

  /** @param {Held} held */
  #layNode(held) {
    let from = held.first;
    let used = 0;
    for (let i = held.first; i < held.past; i++) {
      const text = this.texts[i];
      const size = width(text);
      if (used && used + size > this.columns) {
        this.lines.push({ held, head: false, from, to: i });
        from = i;
        used = 0;
      }
      used += size;
      if (text.includes("\n")) {
        this.lines.push({ held, head: false, from, to: i + 1 });
        from = i + 1;
        used = 0;
      }
    }
    if (from < held.past) this.lines.push({ held, head: false, from, to: held.past });
  }

  /** Return the node of a token. @param {number} token @returns {Held | undefined} */
  heldOf(token) {
    return this.nodes[search(this.nodes.length, (i) => this.nodes[i].past > token)];
  }

  /** Return the line of a token, or of its node's head if the node is folded. @param {number} token */
  lineOf(token) {
    const at = search(
      this.lines.length,
      (i) => (this.lines[i].head && this.lines[i].held.folded ? this.lines[i].held.past : this.lines[i].to) > token,
    );
    return Math.min(at, this.lines.length - 1);
  }

  /** @param {number} id of a node @returns {Held | undefined} */
  node(id) {
    return this.nodes.find((held) => held.node.id === id);
  }

  /**
   * Return the next token in direction `by` for which `wanted` is true, or `from` if there is none.
   * @param {number} from
   * @param {1 | -1} by
   * @param {(token: number) => boolean} wanted
   */
  next(from, by, wanted) {
    for (let i = from + by; i >= 0 && i < this.count; i += by) if (wanted(i)) return i;
    return from;
  }
}

/** Return the first of 0 … n-1 for which `past` is true, or n if there is none. @param {number} n @param {(i: number) => boolean} past */
function search(n, past) {
  let [low, high] = [0, n];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (past(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Return the width of a text in columns. @param {string} text */
function width(text) {
  let size = text.length;
  for (const found of text.matchAll(WIDE)) size += found[0].length === 1 ? 1 : 0;
  return size;
}

/** @param {string} bytes */
function hex(bytes) {
  return bytes ? bytes.replace(/../g, (pair) => `\\x${pair}`) : "▯";
}
