/** The tree of a rollout, its branches as training sees them, and each fork with the token at which the branches diverge. */

import { el, fill } from "../dom.js";
import { count, number, plural } from "../format.js";
import { empty } from "../notice.js";
import { go, href } from "../router.js";
import { causeBadge, rewardText, roleBadge } from "../status.js";
import { line, table } from "../table.js";
import { visible } from "../text.js";
import { Tree } from "../tree.js";

/** @typedef {import("../api.js").Json} Json */

/** @type {import("../table.js").Head[]} */
const BRANCHES = [
  ["branch", ""],
  ["tokens", "num"],
  ["trained", "num"],
  ["row", "num"],
];

export class TreeTab {
  /** @param {import("../record.js").Record} record */
  constructor(record) {
    this.record = record;
    this.tree = new Tree((node) => this.#choose(node));
    this.detail = el("div.panel-body", { "aria-live": "polite" });
    this.branches = el("div.table-scroll");
    this.parts = [
      el("section.panel", { "aria-label": "Tree" }, this.tree.element),
      el(
        "div.tree-side",
        null,
        el("section.panel", null, el("div.panel-head", null, el("h2", { text: "Turn" })), this.detail),
        el("section.panel", null, el("div.panel-head", null, el("h2", { text: "Branches" })), this.branches),
      ),
    ];
    this.element = el("div.tree-tab", null, ...this.parts);
    this.keys = [
      { key: "j", does: "next turn", run: () => this.#step(1) },
      { key: "k", does: "previous turn", run: () => this.#step(-1) },
      { key: "f", does: "next fork", run: () => this.#nextFork() },
      {
        key: "Enter",
        does: "open the turn",
        run: () => this.tree.selected !== null && go(href(["rollout", record.id], { node: this.tree.selected })),
      },
    ];
  }

  /** @param {import("../router.js").Place} place */
  async show(place) {
    await this.update();
    const first = this.tree.rows.find((row) => row.cause) ?? this.tree.rows[0];
    if (first) this.#choose(Number(place.query.node) || first.node.id);
  }

  async update() {
    const { tree } = this.record;
    if (!tree.nodes.length)
      return fill(this.element, empty("No tree", "The tree starts with the agent's first call."));
    if (this.parts[0].parentNode !== this.element) fill(this.element, ...this.parts);
    this.tree.show(tree, new Set(this.record.inOrder()));
    const cells = (/** @type {Json} */ branch) => [
      el("a", { href: href(["rollout", this.record.id], { node: branch.leaf }), text: this.record.nameOf(branch) }),
      count(branch.tokens),
      count(branch.trained),
      branch.row === null ? "–" : branch.row,
    ];
    fill(
      this.branches,
      table(
        BRANCHES,
        tree.branches.map((/** @type {Json} */ one) => line(BRANCHES, cells(one))),
      ),
    );
  }

  leave() {}

  /** @param {number} id */
  #choose(id) {
    this.tree.select(id);
    const row = this.tree.rows.find((one) => one.node.id === id);
    if (!row) return;
    const { node, fork } = row;
    const sampled = node.kind === "sampled";
    /** @type {[string, any][]} */
    const pairs = [
      ["role", sampled ? roleBadge(node) : "–"],
      ["role decided by", node.evidence ?? "–"],
      ["sampled", sampled ? plural(node.tokens, "token") : "–"],
      ["prompt", plural(node.start, "token")],
      ["finish", node.finish ?? "–"],
      ["trained", sampled ? (node.trained ? `yes, in row ${node.row}` : `no: ${node.reason || "not in any row"}`) : "–"],
      ["rewards", node.rewards?.length ? node.rewards.map(rewardText).join(", ") : "–"],
      ["mean log-probability", number(node.mean_logprob)],
      [
        "policy",
        sampled
          ? node.version_start === node.version_end
            ? `v${node.version_start}`
            : `v${node.version_start} to v${node.version_end}`
          : "–",
      ],
    ];
    const links = el(
      "p.toolbar",
      null,
      el("a.button", { href: href(["rollout", this.record.id], { node: id }), text: "Conversation" }),
      el("a.button", {
        href: href(["rollout", this.record.id, "tokens"], { node: id, leaf: this.record.leafThrough(id) }),
        text: "Tokens",
      }),
    );
    fill(
      this.detail,
      el("h2", { text: sampled ? `Turn ${node.turn}` : "A call without a reply" }),
      el("p.muted.tree-said", { text: node.label }),
      el("dl.pairs", null, ...pairs.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", null, value)])),
      row.cause && forkOf(row.cause, fork),
      links,
    );
  }

  /** @param {number} by */
  #step(by) {
    const at = this.tree.rows.findIndex((row) => row.node.id === this.tree.selected);
    const to = this.tree.rows[Math.max(0, Math.min(this.tree.rows.length - 1, at + by))];
    if (to) this.#choose(to.node.id);
  }

  #nextFork() {
    const { rows, selected } = this.tree;
    const at = rows.findIndex((row) => row.node.id === selected);
    const next = rows.find((row, i) => i > at && row.cause) ?? rows.find((row) => row.cause);
    if (next) this.#choose(next.node.id);
  }
}

/** @param {string} cause @param {Json | null} fork */
function forkOf(cause, fork) {
  const word = (/** @type {Json | null} */ token) =>
    token
      ? el("code.token-word", {
          title: `id ${token.id}`,
          text: token.text === null ? `id ${token.id}` : visible(token.text),
        })
      : el("span.muted", { text: "(end)" });
  if (!fork) return el("p.fork", null, causeBadge(cause), " a branch starts here");
  return el(
    "div.fork-detail",
    null,
    el("p", null, causeBadge(cause), ` shares ${plural(fork.shared, "token")} with its parent branch`),
    fork.detail && el("p", { text: `Reason: ${fork.detail}` }),
    fork.from !== null && el("p", null, `token ${count(fork.at)}: was `, word(fork.was), ", is ", word(fork.now)),
  );
}
