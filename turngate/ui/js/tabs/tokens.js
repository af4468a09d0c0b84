/**
 * Every token of a branch: its probability as a color, and whether it was sampled and trained. Only visible lines are elements, so that
 * a hundred thousand tokens scroll smoothly.
 */

import * as api from "../api.js";
import { el, fill } from "../dom.js";
import { count, plural } from "../format.js";
import { empty, say } from "../notice.js";
import { href, note } from "../router.js";
import { detailOf, legend, summaryOf } from "../tokendetail.js";
import { TokenLines } from "../tokenlines.js";
import { TokenMap } from "../tokenmap.js";
import { headOf, lineOf } from "../tokenrows.js";
import { Windowed } from "../windowed.js";

/** @typedef {import("../api.js").Json} Json */

const PIECE = 10000; // tokens per request
const UNLIKELY = Math.log(0.05);

export class TokensTab {
  /** @param {import("../record.js").Record} record */
  constructor(record) {
    this.record = record;
    this.tokens = new TokenLines();
    /** @type {number | null} the last node of the branch; null means the main branch */
    this.leaf = null;
    this.selected = -1;
    this.age = 0;
    this.cell = 7.5; // pixels per character
    this.window = new Windowed({ label: "Tokens", role: "grid", height: () => 22, row: (index) => this.#row(index) });
    this.window.element.addEventListener("click", (/** @type {MouseEvent} */ event) => this.#clicked(event));
    this.window.element.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#hovered(event));
    this.window.element.addEventListener("pointerleave", () => this.#detail(this.selected));
    this.resized = new ResizeObserver(() => this.#measure());
    this.resized.observe(this.window.element);
    this.map = new TokenMap(this.window);
    this.detail = el("div.token-one", { "aria-live": "polite" });
    this.summary = el("div.token-all");
    this.branch = el("select.field", {
      "aria-label": "Branch",
      on: { change: () => this.#go(this.branch.value ? Number(this.branch.value) : null) },
    });
    this.status = el("span.muted", { role: "status" });
    const context = el("button.button", {
      type: "button",
      text: "Fold context",
      on: { click: () => this.#foldAll() },
    });
    this.parts = [
      el("div.tokens-tools", null, this.branch, context, legend(), el("span.spread"), this.status),
      el("div.tokens-view.panel", null, this.window.element, this.map.element),
      el("aside.tokens-detail.panel", { "aria-label": "Token" }, this.detail, this.summary),
    ];
    this.element = el("div.tokens", null, ...this.parts);
    const step = (/** @type {1 | -1} */ by, /** @type {(token: number) => boolean} */ wanted) => () =>
      this.select(this.tokens.next(this.selected, by, wanted));
    const seen = (/** @type {number} */ i) => !this.tokens.heldOf(i)?.folded;
    const unlikely = (/** @type {number} */ i) => (this.tokens.logprobs[i] ?? 0) < UNLIKELY;
    const turn = (/** @type {number} */ i) =>
      this.tokens.heldOf(i)?.node.kind === "sampled" && this.tokens.heldOf(i)?.first === i;
    this.keys = [
      { key: "ArrowRight", does: "next token", run: step(1, seen) },
      { key: "ArrowLeft", does: "previous token", run: step(-1, seen) },
      { key: "ArrowDown", does: "line below", run: () => this.#below(1) },
      { key: "ArrowUp", does: "line above", run: () => this.#below(-1) },
      { key: "n", does: "next unlikely token (below 5 %)", run: step(1, unlikely) },
      { key: "N", does: "previous unlikely token", run: step(-1, unlikely) },
      { key: "j", does: "next turn", run: step(1, turn) },
      { key: "k", does: "previous turn", run: step(-1, turn) },
      { key: "x", does: "fold or unfold context", run: () => this.#foldAll() },
    ];
  }

  /** @param {import("../router.js").Place} place */
  async show(place) {
    const node = Number(place.query.node) || null;
    const leaf = Number(place.query.leaf) || (node === null ? null : this.record.leafThrough(node));
    this.leaf = leaf !== null && this.record.byId.has(leaf) ? leaf : null;
    await this.#load(node, Number(place.query.token) || 0);
  }

  /** Load new tokens, because the branch was extended or a different branch is now the main one. */
  async update() {
    const last = this.tokens.nodes[this.tokens.nodes.length - 1];
    const path = this.record.path(this.#leafNow());
    if (this.busy) return;
    if (last && path.includes(last.node.id)) {
      if (path[path.length - 1] !== last.node.id)
        await this.#fetch({ node: path[path.indexOf(last.node.id) + 1] }, ++this.age);
    } else if (path.length) {
      await this.#load(null, 0);
    }
  }

  leave() {
    this.age += 1;
    this.resized.disconnect();
    this.window.leave();
  }

  #leafNow() {
    return this.leaf ?? this.record.tree.main ?? this.record.tree.nodes.at(-1)?.id ?? null;
  }

  /** @param {number | null} node @param {number} token */
  async #load(node, token) {
    const age = ++this.age;
    this.tokens = new TokenLines();
    this.selected = -1;
    this.#lay();
    this.#offerBranches();
    fill(this.detail, el("p.muted", { text: "Point at a token, or select one with the arrow keys." }));
    if (this.#leafNow() === null)
      return void fill(this.element, empty("No tokens", "Tokens appear with the first recorded turn."));
    if (this.parts[0].parentNode !== this.element) fill(this.element, ...this.parts);
    await this.#fetch({}, age, () => {
      const held = node === null ? undefined : this.tokens.node(node);
      if (!held || this.selected !== -1 || held.first + token >= held.past) return;
      held.folded = false;
      this.#lay();
      this.select(held.first + token, "middle");
    });
  }

  /** @param {Json} from @param {number} age @param {() => void} [onPiece] */
  async #fetch(from, age, onPiece) {
    this.busy = true;
    let next = from;
    try {
      while (next) {
        const got = await api.tokens(this.record.id, { ...next, limit: PIECE, branch: this.#leafNow() });
        if (age !== this.age) return;
        this.tokens.append(got.nodes);
        next = got.next;
        this.#lay();
        onPiece?.();
        fill(this.summary, ...summaryOf(this.tokens));
        this.status.textContent = next
          ? `${count(this.tokens.count)} of ${count(got.total)} tokens …`
          : plural(this.tokens.count, "token");
        if (!got.readable && !this.warned) {
          this.warned = true;
          say(
            `Token texts are not available: ${this.record.detail.unreadable || "the tokenizer is not on this machine"}`,
            "bad",
          );
        }
      }
    } finally {
      if (age === this.age) this.busy = false;
    }
  }

  #offerBranches() {
    const options = [
      el("option", { value: "", text: "main" }),
      ...this.record.tree.branches.map((/** @type {Json} */ b) =>
        el("option", { value: b.leaf, text: this.record.nameOf(b) }),
      ),
    ];
    if (this.leaf !== null && !this.record.tree.branches.some((/** @type {Json} */ b) => b.leaf === this.leaf))
      options.push(el("option", { value: this.leaf, text: `up to node ${this.leaf}` }));
    fill(this.branch, ...options);
    this.branch.value = this.leaf === null ? "" : String(this.leaf);
    this.branch.hidden = options.length < 3;
  }

  /** @param {number | null} leaf */
  #go(leaf) {
    this.leaf = leaf;
    this.#load(null, 0);
  }

  #measure() {
    const probe = el("span.token-line.probe", { text: "m".repeat(100) });
    this.window.element.append(probe);
    this.cell = probe.getBoundingClientRect().width / 100 || this.cell;
    probe.remove();
    const columns = Math.max(20, Math.floor((this.window.space.clientWidth - 16) / this.cell));
    if (columns !== this.tokens.columns || !this.tokens.lines.length) this.#lay(columns);
  }

  #lay(columns = Math.max(20, Math.floor((this.window.space.clientWidth - 16) / this.cell))) {
    this.tokens.lay(columns);
    this.window.refill(this.tokens.lines.length);
    this.map.show(this.tokens);
  }

  #foldAll() {
    const contexts = this.tokens.nodes.filter((held) => held.node.kind === "context");
    const fold = contexts.some((held) => !held.folded);
    for (const held of contexts) held.folded = fold;
    this.#lay();
    if (this.selected >= 0) this.window.reveal(this.tokens.lineOf(this.selected), "middle");
  }

  /** @param {number} index */
  #row(index) {
    const line = this.tokens.lines[index];
    if (!line.head) return lineOf(this.tokens, line, this.selected);
    return headOf(line.held, this.record.byId.get(line.held.node.id)?.mean_logprob ?? null);
  }

  /** @param {MouseEvent} event */
  #clicked(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const fold = target.closest("[data-fold]");
    if (fold) {
      const held = this.tokens.node(Number(fold.getAttribute("data-fold")));
      if (held) held.folded = !held.folded;
      this.#lay();
    }
    const token = target.closest(".t[data-i]");
    if (token) this.select(Number(token.getAttribute("data-i")));
  }

  /** @param {PointerEvent} event */
  #hovered(event) {
    const token = /** @type {HTMLElement} */ (event.target).closest(".t[data-i]");
    if (!token || event.pointerType === "touch") return;
    if (!event.movementX && !event.movementY) return; // the tokens moved under the pointer
    this.#detail(Number(token.getAttribute("data-i")));
  }

  /** @param {number} token */
  #detail(token) {
    if (token >= 0) fill(this.detail, ...detailOf(this.tokens, token));
  }

  /** Select the token above or below. @param {1 | -1} by */
  #below(by) {
    if (this.selected < 0) return this.select(this.tokens.lines.find((line) => !line.head)?.from ?? 0);
    const { lines } = this.tokens;
    const from = this.tokens.lineOf(this.selected);
    let to = from + by;
    while (to >= 0 && to < lines.length && lines[to].head) to += by;
    if (to < 0 || to >= lines.length) return;
    this.select(Math.min(lines[to].to - 1, lines[to].from + (this.selected - lines[from].from)));
  }

  /** @param {number} token @param {"near" | "middle"} [where] */
  select(token, where = "near") {
    if (token < 0 || token >= this.tokens.count) return;
    const held = this.tokens.heldOf(token);
    if (held?.folded) {
      held.folded = false;
      this.#lay();
    }
    const touched = [this.tokens.lineOf(Math.max(0, this.selected)), this.tokens.lineOf(token)];
    this.selected = token;
    this.window.reveal(touched[1], where);
    this.window.redraw((index) => touched.includes(index));
    this.window.element.setAttribute("aria-activedescendant", "token-selected");
    this.#detail(token);
    if (held)
      note(
        href(["rollout", this.record.id, "tokens"], { node: held.node.id, token: token - held.first, leaf: this.leaf }),
      );
  }
}
