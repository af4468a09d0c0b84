/**
 * Show text from agents and tools. Characters that would hide, reverse or overwrite text are replaced by visible signs, and a long text is
 * shown in part until the user requests more.
 */

import { el } from "./dom.js";
import { bytes } from "./format.js";
import { codeOf, HIDDEN, signOf } from "./hidden.js";

const PIECE = 6000; // characters shown initially
const MORE = 60000; // additional characters shown with every click

/**
 * Create a fragment with `text`, in which every invisible character is replaced by a small sign that names it.
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function plain(text) {
  const made = document.createDocumentFragment();
  let from = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > from) made.append(text.slice(from, found.index));
    made.append(sign(found[0]));
    from = found.index + found[0].length;
  }
  if (from < text.length) made.append(text.slice(from));
  return made;
}

/** @param {string} character */
function sign(character) {
  return el("span.hidden-char", {
    title: `${codeOf(character)}, an invisible character`,
    text: signOf(character),
  });
}

/**
 * Create a block of preformatted text. A long text is shown in part.
 * @param {string} text
 * @param {string} [spec] the element: "pre.code"
 * @param {number} [first] characters shown initially
 * @returns {HTMLElement}
 */
export function block(text, spec = "pre.said", first = PIECE) {
  const body = el(spec, { dir: "ltr" });
  let shown = Math.min(text.length, whole(text, first));
  body.append(plain(text.slice(0, shown)));
  if (shown >= text.length) return body;
  const more = el("button.more", { type: "button" });
  const label = () => {
    more.textContent = `Show more (${bytes(text.length - shown)} of ${bytes(text.length)} left)`;
  };
  more.addEventListener("click", () => {
    const next = Math.min(text.length, whole(text, shown + MORE));
    body.append(plain(text.slice(shown, next)));
    shown = next;
    if (shown >= text.length) more.remove();
    else label();
  });
  label();
  return el("div.long", null, body, more);
}

/**
 * Return `at`, moved so that no character is cut in half.
 * @param {string} text
 * @param {number} at
 */
function whole(text, at) {
  const code = text.charCodeAt(at - 1);
  return code >= 0xd800 && code <= 0xdbff ? at + 1 : at;
}

/**
 * Return the first line of a text, for places with room for only one.
 * @param {string} text
 * @param {number} [length]
 */
export function firstLine(text, length = 140) {
  const line = text
    .slice(0, 4 * length)
    .trimStart()
    .split("\n", 1)[0];
  return line.length > length ? `${line.slice(0, whole(line, length))}…` : line;
}

/**
 * Make the spaces and line ends in a token's text visible.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(/ /g, "·").replace(/\t/g, "⇥").replace(/\n/g, "↵").replace(HIDDEN, "▯");
}
