/**
 * Text of agents and tools, unchanged: characters that would hide, reverse or overwrite text get a visible sign, and a long text is shown
 * in part until more is requested.
 */

import { el } from "./dom.js";
import { bytes } from "./format.js";
import { codeOf, HIDDEN, signOf } from "./hidden.js";

const PIECE = 6000; // characters that are shown at once
const MORE = 60000; // and with every click after that

/**
 * A fragment with `text`, every hidden character as a small sign that names it.
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
 * A block of preformatted text, in part where it is long.
 * @param {string} text
 * @param {string} [spec] the element: "pre.code"
 * @param {number} [first] characters that are shown at once
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
 * `at`, moved so that no character is cut in half.
 * @param {string} text
 * @param {number} at
 */
function whole(text, at) {
  const code = text.charCodeAt(at - 1);
  return code >= 0xd800 && code <= 0xdbff ? at + 1 : at;
}

/**
 * The first line of a text, for where there is room for one.
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
 * A token's text in which spaces and line ends can be seen.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(/ /g, "·").replace(/\t/g, "⇥").replace(/\n/g, "↵").replace(HIDDEN, "▯");
}
