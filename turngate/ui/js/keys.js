/**
 * Keyboard shortcuts. The page has one listener; each view has its own bindings, and `?` lists them. While a field has the focus, only
 * Escape is handled, and it leaves the field.
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

/** @param {Binding[]} bindings of the current view */
export function bind(bindings) {
  ofView = bindings;
}

/** @returns {{view: Binding[], everywhere: Binding[]}} */
export function bindings() {
  return { view: ofView, everywhere };
}

/** Start listening. Call it once. */
export function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]")) return; // a dialog handles its own keys
    const target = /** @type {HTMLElement} */ (event.target);
    if (typing(target)) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (event.key === "Enter" && target.closest("a, button, summary, select")) return; // the element handles it
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
