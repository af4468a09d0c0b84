/**
 * Characters that cannot be seen but do something: control characters, marks that turn the direction of text, invisible spaces. Whatever
 * is shown goes through here (`dom.js`, `text.js`), so that a name or an output cannot look like another one.
 */

/** But for tab and newline. Joiners inside emoji and Arabic words stay, because they change what is seen. */
export const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

/** @type {Object<string, string>} */
const SIGNS = { "\u001b": "␛", "\u0000": "␀", "\u0007": "␇", "\u0008": "␈", "\r": "␍", "\u200b": "␣", "\u007f": "␡" };

/** What stands for it in running text. @param {string} character */
export function signOf(character) {
  return SIGNS[character] ?? codeOf(character);
}

/** Its number, as it is written in tables. @param {string} character */
export function codeOf(character) {
  return `U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** The text, with a sign for each of them. @param {string} text */
export function seen(text) {
  return text.replace(HIDDEN, (character) => `⟨${signOf(character)}⟩`);
}
