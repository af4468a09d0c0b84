/**
 * Invisible characters: control characters, direction marks, invisible spaces. All shown text passes through here, so that such characters
 * cannot disguise a name or an output.
 */

/** Invisible characters, except those that change what is shown: tab, newline, joiners, emoji variation selectors and visible spaces. */
export const HIDDEN = new RegExp(
  `[${[
    "\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad", // control characters, soft hyphen
    "\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff0-\\ufffb", // direction, lines, words
    "\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u2800\\u3164\\uffa0", // blank letters and signs
    "\\ufe00-\\ufe0d\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}", // variants, notation, tags
  ].join("")}]`,
  "gu",
);

/** @type {Object<string, string>} */
const SIGNS = { "\u001b": "␛", "\u0000": "␀", "\u0007": "␇", "\u0008": "␈", "\r": "␍", "\u200b": "␣", "\u007f": "␡" };

/** Return what is shown in place of an invisible character: a sign, or its code point. @param {string} character */
export function signOf(character) {
  return SIGNS[character] ?? codeOf(character);
}

/** Return the code point, such as U+200B. @param {string} character */
export function codeOf(character) {
  return `U+${(character.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Replace invisible characters by visible signs. @param {string} text */
export function seen(text) {
  return text.replace(HIDDEN, (character) => `⟨${signOf(character)}⟩`);
}
