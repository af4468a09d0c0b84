/**
 * The loaded data of one rollout: its detail, its tree, and its messages in the order of recording. It loads only what is new.
 */

import * as api from "./api.js";

/** @typedef {import("./api.js").Json} Json */

const PIECE = 100; // nodes per request
const NOTHING = { nodes: [], forks: [], branches: [], main: null };

export class Record {
  /** @param {string} id */
  constructor(id) {
    this.id = id;
    /** @type {Json} */
    this.detail = {};
    /** @type {Json} */
    this.tree = NOTHING;
    /** @type {Map<number, Json>} messages of each node */
    this.messages = new Map();
    this.next = 0;
    /** @type {Map<number, Json>} */
    this.byId = new Map();
  }

  /** @returns {Json} */
  get row() {
    return this.detail.rollout;
  }

  /** Load the detail and the tree. A rollout without a session has no tree. */
  async load() {
    const [detail, tree] = await Promise.all([api.rollout(this.id), api.orElse(api.tree(this.id), NOTHING)]);
    this.detail = detail;
    this.#plant(tree);
  }

  /** Load new messages, and call `onPiece` after each piece. @param {() => void} [onPiece] */
  async converse(onPiece) {
    for (;;) {
      const asked = api.messages(this.id, { after: this.next, limit: PIECE });
      const got = await api.orElse(asked, { nodes: [], more: false });
      for (const node of got.nodes) this.messages.set(node.id, node);
      this.next = got.next ?? this.next;
      if (got.nodes.length) onPiece?.();
      if (!got.more) return;
    }
  }

  /** Load the omitted parts of the main conversation. */
  async complete() {
    for (const id of this.inOrder()) {
      if (!this.messages.get(id)?.messages.some((/** @type {Json} */ message) => message.cut)) continue;
      const got = await api.messages(this.id, { node: id });
      this.messages.set(id, got.nodes[0]);
    }
  }

  /** @param {Json} tree */
  #plant(tree) {
    this.tree = tree;
    this.byId = new Map(tree.nodes.map((/** @type {Json} */ node) => [node.id, node]));
  }

  /** Return the path from the root to a node. @param {number | null} leaf @returns {number[]} */
  path(leaf) {
    const found = [];
    for (let at = leaf; at !== null && at !== undefined; at = this.byId.get(at)?.parent ?? null) found.push(at);
    return found.reverse();
  }

  /**
   * Return the ids of the main conversation's nodes, including those from before compactions, in the order of recording.
   * @param {boolean} [all] return the ids of all nodes instead
   * @returns {number[]}
   */
  inOrder(all = false) {
    const { nodes } = this.tree;
    if (all) return nodes.map((/** @type {Json} */ node) => node.id);
    const kept = new Set();
    for (const node of nodes) {
      if (node.kind !== "sampled" || node.role !== "main") continue;
      kept.add(node.parent);
      kept.add(node.id);
    }
    const last = nodes[nodes.length - 1];
    if (last?.kind === "context" && (last.parent === null ? !kept.size : kept.has(last.parent))) kept.add(last.id);
    const found = nodes
      .filter((/** @type {Json} */ node) => kept.has(node.id))
      .map((/** @type {Json} */ node) => node.id);
    return found.length ? found : this.path(this.tree.main);
  }

  /** Return the leaf of a branch through a node: a main branch if there is one, otherwise the longest branch. @param {number} node */
  leafThrough(node) {
    const through = this.tree.branches.find((/** @type {Json} */ branch) => this.path(branch.leaf).includes(node));
    return through?.leaf ?? node;
  }

  /** @param {number} node @returns {Json | undefined} */
  forkAt(node) {
    return this.tree.forks.find((/** @type {Json} */ fork) => fork.node === node);
  }

  /** Return the name of a branch: its role and its turns. @param {Json} branch */
  nameOf(branch) {
    const turns = this.path(branch.leaf)
      .map((id) => this.byId.get(id))
      .filter((node) => node?.kind === "sampled");
    const first = turns[0]?.turn;
    const last = turns[turns.length - 1]?.turn;
    const span = first === last ? `turn ${last ?? "–"}` : `turns ${first}–${last}`;
    return `${branch.role ?? "branch"} · ${span}`;
  }
}
