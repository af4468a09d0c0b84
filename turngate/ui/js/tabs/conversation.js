/**
 * The conversation of a rollout, live: the turns of one branch, with the tree beside them. New turns appear below; a reader at the end
 * stays at the end.
 */

import * as api from "../api.js";
import { el, fill } from "../dom.js";
import { duration, plural, when } from "../format.js";
import { messageOf } from "../message.js";
import { empty, failed } from "../notice.js";
import { href, note } from "../router.js";
import { addressOf, causeBadge, lives, rewardLabel, roleBadge } from "../status.js";
import { Tree } from "../tree.js";

/** @typedef {import("../api.js").Json} Json */

export class Conversation {
  /** @param {import("../record.js").Record} record @param {HTMLElement} scroller the scrolling element */
  constructor(record, scroller) {
    this.record = record;
    this.scroller = scroller;
    /** @type {number | null} the selected branch; null if no single branch is selected */
    this.leaf = null;
    this.all = false; // whether to show all turns, not only the main conversation
    /** @type {Map<number, HTMLElement>} shown articles */
    this.shown = new Map();
    this.at = -1; // the node selected by keyboard
    this.tree = new Tree((node) => this.#choose(node));
    this.list = el("div.turns", { role: "feed", "aria-label": "Conversation" });
    this.fresh = el("button.button.is-on.to-end", { type: "button", hidden: true, on: { click: () => this.#toEnd() } });
    this.branch = el("select.field", { "aria-label": "Branch", on: { change: () => this.#branch(this.branch.value) } });
    this.tools = el(
      "div.toolbar",
      null,
      el("label.label", null, "Branch", this.branch),
      el("button.button", { type: "button", text: "Unfold all", on: { click: () => this.#unfold() } }),
    );
    const aside = el(
      "aside.beside.panel",
      { "aria-label": "Tree" },
      el("div.panel-head", null, el("h2", { text: "Tree" })),
      this.tree.element,
    );
    this.element = el("div.conversation", null, el("div.turns-side", null, this.tools, this.list, this.fresh), aside);
    this.keys = [
      { key: "j", does: "next turn", run: () => this.#step(1) },
      { key: "k", does: "previous turn", run: () => this.#step(-1) },
      { key: "Enter", does: "fold or unfold turn", run: () => this.#toggle() },
      { key: "x", does: "fold or unfold all", run: () => this.#unfold() },
      { key: "G", does: "go to the end", run: () => this.#toEnd() },
    ];
  }

  /** @param {import("../router.js").Place} place */
  async show(place) {
    const node = Number(place.query.node) || null;
    if (node !== null && this.record.byId.has(node) && !this.#path().includes(node))
      this.leaf = this.record.leafThrough(node);
    await this.update();
    if (node !== null) this.#focus(node);
  }

  /** Update the view from the record. */
  async update() {
    this.#draw();
    try {
      await this.record.converse(() => this.#draw());
    } catch (error) {
      if (!this.shown.size)
        fill(
          this.list,
          failed(error, () => this.update()),
        );
      else throw error;
    }
    this.#draw();
  }

  leave() {}

  #path() {
    return this.leaf === null ? this.record.inOrder(this.all) : this.record.path(this.leaf);
  }

  #draw() {
    const path = this.#path();
    this.tree.show(this.record.tree, new Set(path));
    this.#offerBranches();
    const wanted = path.filter((id) => this.record.messages.has(id));
    const atEnd = this.#atEnd();
    const first = !this.shown.size;
    for (const [id, article] of this.shown) {
      if (wanted.includes(id)) continue;
      article.remove();
      this.shown.delete(id);
    }
    if (wanted.length && !this.shown.size) fill(this.list);
    let added = 0;
    /** @type {HTMLElement | null} */
    let before = null;
    for (const id of wanted) {
      const known = this.shown.get(id);
      const article = known ?? this.#article(id);
      if (!known) {
        this.shown.set(id, article);
        if (before) before.after(article);
        else this.list.prepend(article);
        if (this.record.byId.get(id)?.kind === "sampled") added += 1;
      }
      before = article;
    }
    for (const id of wanted) this.#refresh(id);
    if (!wanted.length) fill(this.list, this.#nothing());
    if (first || !added) return;
    if (atEnd) this.#toEnd();
    else {
      this.fresh.textContent = `${plural(added, "new turn")} below ↓`;
      this.fresh.hidden = false;
    }
  }

  #nothing() {
    const row = this.record.row;
    if (row && lives(row))
      return empty("No messages yet", "The first call appears here as soon as its reply is stored.");
    return empty(
      "No messages",
      "This rollout ended before the agent received a reply.",
      el("a.button", { href: addressOf(this.record.id, "details"), text: "Show stages and logs" }),
    );
  }

  #offerBranches() {
    const { branches } = this.record.tree;
    const options = [
      el("option", { value: "", text: "main conversation" }),
      el("option", { value: "all", text: "all turns" }),
    ];
    for (const branch of branches) options.push(el("option", { value: branch.leaf, text: this.record.nameOf(branch) }));
    const now = this.leaf === null ? (this.all ? "all" : "") : String(this.leaf);
    if (this.branch.childElementCount !== options.length) fill(this.branch, ...options);
    this.branch.value = now;
    this.tools.firstElementChild.hidden = branches.length < 2;
  }

  /** @param {number} id @returns {HTMLElement} */
  #article(id) {
    const node = /** @type {Json} */ (this.record.messages.get(id));
    const sampled = node.kind === "sampled";
    const body = node.messages.map((/** @type {Json} */ message) =>
      messageOf(message, message.cut ? () => this.#whole(id) : null),
    );
    const fork = node.cause && el("p.fork", null, causeBadge(node.cause), this.#forkText(id));
    const head = sampled && el("header.turn-head");
    return el(
      "article.turn",
      {
        class: sampled ? "is-sampled" : "is-context",
        tabindex: "-1",
        id: `node-${id}`,
        "aria-label": sampled ? `Turn ${node.turn}` : "Context",
      },
      fork,
      head,
      ...body,
    );
  }

  /** @param {number} id */
  #forkText(id) {
    const fork = this.record.forkAt(id);
    if (!fork) return " a branch starts here";
    const tokens = href(["rollout", this.record.id, "tokens"], {
      node: fork.now?.node ?? id,
      leaf: this.record.leafThrough(id),
    });
    return [
      ` a branch starts here: it shares ${plural(fork.shared, "token")} with its parent branch `,
      "and differs from the next token on. ",
      fork.detail && `Reason: ${fork.detail}. `,
      el("a", { href: tokens, text: "Show tokens" }),
    ];
  }

  /** Update what can change after a turn was stored: its role, its rewards, and whether it is trained. @param {number} id */
  #refresh(id) {
    const head = this.shown.get(id)?.querySelector(".turn-head");
    const node = this.record.messages.get(id);
    const now = this.record.byId.get(id) ?? node;
    if (!head || !node || !now) return;
    const rewards = now.rewards ?? [];
    const look = `${now.role}/${now.evidence}/${now.trained}/${now.reason}/${JSON.stringify(rewards)}`;
    if (head.getAttribute("data-look") === look) return;
    head.setAttribute("data-look", look);
    const tokens = href(["rollout", this.record.id, "tokens"], { node: id, leaf: this.leaf });
    fill(
      head,
      el("strong", { text: `Turn ${node.turn}` }),
      roleBadge(now),
      now.trained
        ? el("span.trained", { title: "These tokens are in a training row", text: "trained" })
        : el("span.untrained", { title: now.reason, text: `not trained: ${now.reason || "not in any row"}` }),
      node.fault && el("span.bad", { text: node.fault }),
      ...rewards.map(rewardLabel),
      el(
        "span.turn-end",
        null,
        el("a", { href: tokens, text: plural(node.tokens, "token") }),
        node.seconds !== null && node.seconds !== undefined && el("span", { text: duration(node.seconds) }),
        node.finish && el("span", { text: node.finish }),
        when(node.at),
      ),
    );
  }

  /** @param {number} id */
  async #whole(id) {
    const got = await api.messages(this.record.id, { node: id });
    this.record.messages.set(id, got.nodes[0]);
    const article = this.#article(id);
    this.shown.get(id)?.replaceWith(article);
    this.shown.set(id, article);
    for (const fold of article.querySelectorAll("details")) fold.open = true; // as requested
    this.#refresh(id);
  }

  /** @param {string} value */
  #branch(value) {
    this.all = value === "all";
    this.leaf = value && !this.all ? Number(value) : null;
    this.fresh.hidden = true;
    this.#draw();
  }

  /** Show a turn. If it is not in the current branch, select its branch first. @param {number} node */
  #choose(node) {
    if (!this.#path().includes(node)) {
      this.leaf = this.record.leafThrough(node);
      this.#draw();
    }
    this.#focus(node);
  }

  /** @param {number} node */
  #focus(node) {
    this.at = node;
    this.tree.select(node);
    const article = this.shown.get(node);
    article?.scrollIntoView({ block: "start" });
    article?.focus({ preventScroll: true });
    note(href(["rollout", this.record.id], { node }));
  }

  /** @param {number} by */
  #step(by) {
    const turns = this.#path().filter((id) => this.record.byId.get(id)?.kind === "sampled" && this.shown.has(id));
    if (!turns.length) return;
    const from = turns.indexOf(this.at);
    this.#focus(turns[Math.max(0, Math.min(turns.length - 1, from === -1 && by < 0 ? turns.length - 1 : from + by))]);
  }

  /** Toggle the folds of the selected turn, and of the results that follow it. */
  #toggle() {
    const article = this.shown.get(this.at);
    const next = article?.nextElementSibling;
    const folds = [
      ...(article?.querySelectorAll("details") ?? []),
      ...(next?.matches(".is-context") ? next.querySelectorAll("details") : []),
    ];
    const open = folds.some((one) => !one.open);
    for (const one of folds) one.open = open;
  }

  #unfold() {
    const folds = [...this.list.querySelectorAll("details")];
    const open = folds.some((one) => !one.open);
    for (const one of folds) one.open = open;
    this.tools.lastElementChild.textContent = open ? "Fold all" : "Unfold all";
  }

  #atEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    return scrollTop > 0 && scrollTop + clientHeight >= scrollHeight - 80;
  }

  #toEnd() {
    this.fresh.hidden = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
