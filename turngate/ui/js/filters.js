/** Controls of a list's filters: a search field, menus, and chips with counts. */

import { el, fill } from "./dom.js";
import { count } from "./format.js";

const PAUSE_MS = 200; // after the last keystroke

/**
 * @param {string} value
 * @param {string} label
 * @param {(text: string) => void} changed
 * @returns {HTMLInputElement}
 */
export function searchField(value, label, changed) {
  const field = el("input.field.grow", {
    type: "search",
    value,
    placeholder: `${label}  /`,
    "aria-label": label,
    spellcheck: "false",
  });
  let timer = 0;
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => changed(field.value.trim()), PAUSE_MS);
  });
  return field;
}

/**
 * @param {string} label
 * @param {string} value
 * @param {[string, string][]} choices value and text; the first is "any"
 * @param {(value: string) => void} changed
 * @returns {HTMLElement & {offer: (choices: [string, string][]) => void}}
 */
export function menu(label, value, choices, changed) {
  const field = el("select.field", { "aria-label": label });
  const offer = (/** @type {[string, string][]} */ offered) => {
    const now = field.value || value;
    const known = offered.some(([one]) => one === now)
      ? offered
      : [...offered, /** @type {[string, string]} */ ([now, now])];
    fill(field, ...known.map(([one, text]) => el("option", { value: one, selected: one === now, text })));
  };
  offer(choices);
  field.addEventListener("change", () => changed(field.value));
  return Object.assign(field, { offer });
}

/**
 * Create a row of buttons, one of which is pressed.
 * @param {string} label
 * @param {[string, string][]} choices value and text
 * @param {string} value
 * @param {(value: string) => void} changed
 * @returns {HTMLElement & {counts: (numbers: Object<string, number>) => void}}
 */
export function chips(label, choices, value, changed) {
  const row = el("div.chips", { role: "group", "aria-label": label });
  const buttons = choices.map(([one, text]) => {
    const number = el("span.chip-count");
    const button = el(
      "button.chip",
      { type: "button", "aria-pressed": String(one === value), data: { value: one } },
      text,
      number,
    );
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      changed(one);
    });
    return button;
  });
  row.append(...buttons);
  const counts = (/** @type {Object<string, number>} */ numbers) => {
    for (const button of buttons) {
      const number = numbers[button.dataset.value];
      button.lastElementChild.textContent = number === undefined ? "" : count(number);
    }
  };
  return Object.assign(row, { counts });
}

/**
 * @param {string} first the label for "any"
 * @param {string[]} names
 * @returns {[string, string][]}
 */
export function offers(first, names) {
  return [["", first], ...names.map((name) => /** @type {[string, string]} */ ([name, name]))];
}
