/** Plain tables. Columns of numbers are right-aligned. */

import { el } from "./dom.js";

/**
 * @typedef {[string, "num" | ""]} Head the column's title, and whether it contains numbers
 */

/**
 * @param {Head[]} heads
 * @param {Element[]} lines rows created by `line`
 */
export function table(heads, lines) {
  const head = el("tr", null, ...heads.map(([text, look]) => el("th", { class: look, scope: "col", text })));
  return el("table.plain", null, el("thead", null, head), el("tbody", null, ...lines));
}

/**
 * @param {Head[]} heads the columns of the table
 * @param {any[]} cells texts, or nodes
 * @param {string} [look]
 */
export function line(heads, cells, look = "") {
  return el("tr", { class: look }, ...cells.map((cell, i) => el("td", { class: heads[i][1] }, cell)));
}
