/**
 * The keyboard. One listener for the page; a view says which keys it knows, and `?` lists them with those that work everywhere. Keys
 * typed into a field stay there, but for Escape, which leaves it.
 */

/**
 * @typedef {{key: string, does: string, run: (event: KeyboardEvent) => void}} Binding `key` as in KeyboardEvent.key
 */

/** @type {Binding[]} */
let everywhere = [];
/** @type {Binding[]} */
let ofView = [];

/** @param {Binding[]} bindings */
export function always(bindings) {
  everywhere = bindings;
}

/** @param {Binding[]} bindings of the view that is shown now */
export function bind(bindings) {
  ofView = bindings;
}

/** @returns {{view: Binding[], everywhere: Binding[]}} */
export function bindings() {
  return { view: ofView, everywhere };
}

/** Begins to listen; `main.js` calls it once. */
export function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]")) return; // a dialog has keys of its own
    const target = /** @type {HTMLElement} */ (event.target);
    if (typing(target)) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (event.key === "Enter" && target.closest("a, button, summary, select")) return; // theirs
    const found = ofView.find((b) => b.key === event.key) ?? everywhere.find((b) => b.key === event.key);
    if (!found) return;
    event.preventDefault();
    found.run(event);
  });
}

/** @param {HTMLElement} target */
function typing(target) {
  return target.matches?.("input:not([type=checkbox]):not([type=radio]), textarea, select") ?? false;
}
