/**
 * A list of any length in which only visible rows are elements: ten thousand rollouts, or the lines of a hundred thousand tokens. All rows
 * have the same height.
 */

import { el } from "./dom.js";

const BEYOND = 12; // rows kept above and below the visible ones

/**
 * @typedef {object} Options
 * @property {string} label for screen readers
 * @property {() => number} height of a row in pixels; it may differ in a small window
 * @property {(index: number) => HTMLElement} row
 * @property {(first: number, last: number) => void} [seen] called with the range of visible rows
 * @property {string} [role] of the container; default: "grid"
 */

export class Windowed {
  /** @param {Options} options */
  constructor(options) {
    this.options = options;
    this.count = 0;
    this.height = options.height();
    /** @type {Map<number, HTMLElement>} */
    this.rows = new Map();
    this.space = el("div.window-space", { role: "rowgroup" });
    this.element = el(
      "div.window",
      { tabindex: "0", role: options.role ?? "grid", "aria-label": options.label },
      this.space,
    );
    this.element.addEventListener("scroll", () => this.#soon(), { passive: true });
    this.waiting = false;
    this.resized = new ResizeObserver(() => this.#measure());
    this.resized.observe(this.element);
  }

  /** @param {number} count */
  setCount(count) {
    this.count = count;
    this.element.setAttribute("aria-rowcount", String(count));
    this.space.style.height = `${count * this.height}px`;
    this.draw();
  }

  /** Start over with new rows. @param {number} count */
  refill(count) {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.setCount(count);
  }

  /** Redraw all rows, or those for which `which` returns true. @param {(index: number) => boolean} [which] */
  redraw(which = () => true) {
    for (const [index, row] of this.rows) {
      if (!which(index)) continue;
      row.remove();
      this.rows.delete(index);
    }
    this.draw();
  }

  /** Create and position the rows that are currently visible. */
  draw() {
    const top = Math.floor(this.element.scrollTop / this.height);
    const fits = Math.ceil((this.element.clientHeight || 600) / this.height);
    const first = Math.max(0, top - BEYOND);
    const last = Math.min(this.count - 1, top + fits + BEYOND);
    for (const [index, row] of this.rows) {
      if (index >= first && index <= last) continue;
      row.remove();
      this.rows.delete(index);
    }
    for (let index = first; index <= last; index++) {
      if (!this.rows.has(index)) this.#place(index);
    }
    if (last >= first) this.options.seen?.(first, last);
  }

  /** @param {number} index */
  #place(index) {
    const row = this.options.row(index);
    row.classList.add("window-row");
    row.setAttribute("aria-rowindex", String(index + 1));
    row.style.height = `${this.height}px`;
    row.style.transform = `translateY(${index * this.height}px)`;
    this.rows.set(index, row);
    this.space.append(row);
  }

  /**
   * Scroll to show a row: only as far as needed, or so that the row is in the middle.
   * @param {number} index
   * @param {"near" | "middle"} [where]
   */
  reveal(index, where = "near") {
    const at = index * this.height;
    const { scrollTop, clientHeight } = this.element;
    if (where === "middle") this.element.scrollTop = at - clientHeight / 2 + this.height;
    else if (at < scrollTop) this.element.scrollTop = at;
    else if (at + this.height > scrollTop + clientHeight) this.element.scrollTop = at + this.height - clientHeight;
    this.draw();
  }

  /** Return whether the end of the list is visible. */
  atEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.element;
    return scrollTop + clientHeight >= scrollHeight - 2 * this.height;
  }

  leave() {
    this.resized.disconnect();
  }

  #soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  #measure() {
    const height = this.options.height();
    if (height !== this.height) {
      this.height = height;
      this.space.style.height = `${this.count * height}px`;
      this.redraw();
    } else {
      this.draw();
    }
  }
}
