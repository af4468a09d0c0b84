/**
 * A list that loads while it is scrolled, with sortable columns, a selected row, and keyboard navigation. The lists of rollouts and groups
 * use it.
 */

import { el, fill } from "./dom.js";
import { empty, failed } from "./notice.js";
import { Windowed } from "./windowed.js";

const PIECE = 100;
const SMALL = matchMedia("(max-width: 720px)");

/** @type {Map<string, {top: number, chosen: string}>} the last position in each list */
const LEFT = new Map();

/**
 * @typedef {import("./api.js").Json} Json
 * @typedef {{name: string, label: string, sort?: string, cell: (row: Json) => any, title?: string, num?: boolean}} Column
 * @typedef {object} Options
 * @property {string} label for screen readers
 * @property {string} look a class for the column layout
 * @property {Column[]} columns
 * @property {(offset: number, limit: number, sort: string) => Promise<{rows: Json[], total: number}>} fetch
 * @property {(row: Json) => string} key
 * @property {(row: Json) => void} open
 * @property {string} sort
 * @property {(sort: string) => void} sorted called with a new order
 * @property {(total: number) => void} counted
 * @property {() => string} place the list's name and filters, to restore its position
 * @property {[string, string]} none title and advice for an empty list
 */

export class List {
  /** @param {Options} options */
  constructor(options) {
    this.options = options;
    this.sort = options.sort;
    this.back = LEFT.get(options.place());
    this.chosen = this.back?.chosen ?? "";
    /** @type {(Json | undefined)[]} */
    this.rows = [];
    /** @type {Map<string, number>} */
    this.index = new Map();
    /** @type {Set<number>} pieces that are loaded or loading */
    this.asked = new Set();
    /** @type {Map<string, Json>} rows that changed while pieces were loading, and are newer than the pieces */
    this.heard = new Map();
    this.coming = 0;
    this.total = 0;
    this.age = 0; // increased to discard pending replies
    this.window = new Windowed({
      label: options.label,
      height: () => (SMALL.matches ? 56 : 32),
      row: (index) => this.#row(index),
      seen: (first, last) => this.#seen(first, last),
    });
    this.window.element.addEventListener("click", (/** @type {MouseEvent} */ event) => this.#clicked(event));
    this.head = el("div.list-head", { role: "row", class: options.look });
    this.note = el("div.list-note", { hidden: true });
    this.element = el("div.list.panel", null, this.head, this.window.element, this.note);
    this.#drawHead();
  }

  /** Reload the visible rows. @param {boolean} [top] whether to scroll to the top first */
  async reload(top = false) {
    const age = ++this.age;
    this.asked.clear();
    if (top && !this.back) this.window.element.scrollTop = 0;
    const first = Math.floor(this.window.element.scrollTop / this.window.height / PIECE);
    await this.#fetch(first, age, true);
  }

  /** Update the rows that the list has loaded. Return whether it has loaded all of `rows`. @param {Json[]} rows */
  update(rows) {
    let known = true;
    const touched = new Set();
    for (const row of rows) {
      const at = this.index.get(this.options.key(row));
      if (this.coming) this.heard.set(this.options.key(row), row);
      if (at === undefined) {
        known = false;
      } else {
        this.rows[at] = row;
        touched.add(at);
      }
    }
    this.window.redraw((index) => touched.has(index));
    return known;
  }

  atTop() {
    return this.window.element.scrollTop < this.window.height;
  }

  /** @returns {import("./keys.js").Binding[]} */
  keys() {
    return [
      { key: "j", does: "next row", run: () => this.#step(1) },
      { key: "k", does: "previous row", run: () => this.#step(-1) },
      { key: "ArrowDown", does: "next row", run: () => this.#step(1) },
      { key: "ArrowUp", does: "previous row", run: () => this.#step(-1) },
      { key: "PageDown", does: "page down", run: () => this.#step(this.#fits()) },
      { key: "PageUp", does: "page up", run: () => this.#step(-this.#fits()) },
      { key: "Home", does: "first row", run: () => this.#step(-this.total) },
      { key: "End", does: "last row", run: () => this.#step(this.total) },
      { key: "Enter", does: "open the row", run: () => this.#open(this.index.get(this.chosen)) },
    ];
  }

  leave() {
    LEFT.set(this.options.place(), { top: this.window.element.scrollTop, chosen: this.chosen });
    this.age += 1;
    this.window.leave();
  }

  #fits() {
    return Math.max(1, Math.floor(this.window.element.clientHeight / this.window.height) - 1);
  }

  /** @param {number} by */
  #step(by) {
    if (!this.total) return;
    const from = this.index.get(this.chosen) ?? (by > 0 ? -1 : 0);
    const to = Math.max(0, Math.min(this.total - 1, from + by));
    this.window.reveal(to);
    const row = this.rows[to];
    if (row) this.#choose(this.options.key(row));
    else this.wanted = to; // still loading
    this.window.element.focus({ preventScroll: true });
  }

  /** @param {string} key */
  #choose(key) {
    const touched = [this.index.get(this.chosen), this.index.get(key)];
    this.chosen = key;
    this.window.redraw((index) => touched.includes(index));
    const at = this.index.get(key);
    if (at !== undefined) this.window.element.setAttribute("aria-activedescendant", `row-${at}`);
  }

  /** Find the row by position, because its element may be redrawn between press and release. @param {MouseEvent} event */
  #clicked(event) {
    if (event.target instanceof Element && event.target.closest("a, button")) return;
    const box = this.window.space.getBoundingClientRect();
    const row = this.rows[Math.floor((event.clientY - box.top) / this.window.height)];
    if (!row) return;
    this.#choose(this.options.key(row));
    this.options.open(row);
  }

  /** @param {number | undefined} index */
  #open(index) {
    const row = index === undefined ? undefined : this.rows[index];
    if (row) this.options.open(row);
  }

  /** @param {number} index */
  #row(index) {
    const row = this.rows[index];
    if (!row)
      return el(
        "div.list-row.is-coming",
        { role: "row", id: `row-${index}`, "aria-busy": "true" },
        el("span.muted", { text: "…" }),
      );
    const chosen = this.options.key(row) === this.chosen;
    const cells = this.options.columns.map((column) =>
      el("div.cell", { role: "gridcell", class: `c-${column.name}${column.num ? " num" : ""}` }, column.cell(row)),
    );
    const made = el(
      "div.list-row",
      {
        role: "row",
        id: `row-${index}`,
        class: `${this.options.look} ${chosen ? "is-selected" : ""}`,
        "aria-selected": String(chosen),
      },
      ...cells,
    );
    return made;
  }

  /** @param {number} first @param {number} last */
  #seen(first, last) {
    for (let piece = Math.floor(first / PIECE); piece <= Math.floor(last / PIECE); piece++) {
      if (!this.asked.has(piece)) this.#fetch(piece, this.age, false);
    }
  }

  /** @param {number} piece @param {number} age @param {boolean} fresh discard what was loaded before */
  async #fetch(piece, age, fresh) {
    this.asked.add(piece);
    if (!this.coming) this.heard.clear();
    this.coming += 1;
    let got;
    try {
      got = await this.options.fetch(piece * PIECE, PIECE, this.sort);
    } catch (error) {
      if (age !== this.age) return;
      this.asked.delete(piece);
      if (fresh || !this.total) this.#say(failed(error, () => this.reload()));
      return;
    } finally {
      this.coming -= 1;
    }
    if (age !== this.age) return;
    if (fresh) {
      this.rows = [];
      this.index.clear();
    }
    got.rows.forEach((row, i) => {
      this.rows[piece * PIECE + i] = this.heard.get(this.options.key(row)) ?? row;
      this.index.set(this.options.key(row), piece * PIECE + i);
    });
    this.total = got.total;
    this.options.counted(got.total);
    this.#say(got.total ? null : empty(...this.options.none));
    this.window.redraw((index) => fresh || Math.floor(index / PIECE) === piece);
    this.window.setCount(got.total);
    if (this.back) {
      this.window.element.scrollTop = this.back.top;
      this.back = undefined;
      this.window.draw();
    }
    const wanted = this.wanted === undefined ? undefined : this.rows[this.wanted];
    if (wanted) {
      this.wanted = undefined;
      this.#choose(this.options.key(wanted));
    }
  }

  /** @param {Node | null} note */
  #say(note) {
    this.note.hidden = note === null;
    this.window.element.hidden = note !== null;
    fill(this.note, note);
  }

  #drawHead() {
    const cells = this.options.columns.map((column) => {
      const place = `c-${column.name}${column.num ? " num" : ""}`;
      if (!column.sort)
        return el("div.cell", { role: "columnheader", class: place, title: column.title, text: column.label });
      const down = this.sort === `-${column.sort}`;
      const mine = down || this.sort === column.sort;
      const button = el(
        "button.sort",
        { type: "button", title: column.title ?? `Sort by ${column.label}` },
        column.label,
        mine && el("span", { "aria-hidden": "true", text: down ? " ↓" : " ↑" }),
      );
      button.addEventListener("click", () => {
        this.sort = down ? String(column.sort) : `-${column.sort}`;
        this.#drawHead();
        this.options.sorted(this.sort);
        this.reload(true);
      });
      return el(
        "div.cell",
        { role: "columnheader", class: place, "aria-sort": mine ? (down ? "descending" : "ascending") : null },
        button,
      );
    });
    fill(this.head, ...cells);
  }
}
