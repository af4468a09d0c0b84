/** Dialogs: confirmations, the export menu, and the list of keys. Escape closes them. */

import { el } from "./dom.js";
import { bindings } from "./keys.js";

/**
 * @param {string} title
 * @param {any[]} content
 * @param {string} [size]
 * @returns {HTMLDialogElement}
 */
export function open(title, content, size = "") {
  const id = "dialog-title";
  const close = el("button.icon", { type: "button", "aria-label": "Close", text: "✕" });
  const dialog = el(
    "dialog.dialog",
    { "aria-labelledby": id, class: size },
    el("header.dialog-head", null, el("h2", { id, text: title }), close),
    ...content,
  );
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    if (event.target === dialog) dialog.close();
  });
  dialog.addEventListener("close", () => dialog.remove()); // the browser restores the focus
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * Ask before an action that cannot be undone. Resolves to the answer.
 * @param {string} title
 * @param {string} text what will happen
 * @param {string} verb the button's label
 * @param {boolean} [danger]
 * @returns {Promise<boolean>}
 */
export function confirm(title, text, verb, danger = false) {
  return new Promise((resolve) => {
    const yes = el("button.button", { type: "button", text: verb, class: danger ? "is-danger" : "is-primary" });
    const no = el("button.button", { type: "button", text: "Go back" });
    const dialog = open(title, [el("p.dialog-text", { text }), el("footer.dialog-foot", null, no, yes)]);
    let answer = false;
    yes.addEventListener("click", () => {
      answer = true;
      dialog.close();
    });
    no.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => resolve(answer));
    no.focus();
  });
}

/** Show the keys that work in the current view. */
export function help() {
  const { view, everywhere } = bindings();
  const list = (/** @type {string} */ title, /** @type {import("./keys.js").Binding[]} */ keys) =>
    keys.length && [
      el("h3", { text: title }),
      el(
        "dl.keys",
        null,
        ...keys.flatMap((b) => [el("dt", null, el("kbd", { text: named(b.key) })), el("dd", { text: b.does })]),
      ),
    ];
  open("Keyboard shortcuts", [list("This view", view), list("Everywhere", everywhere)].flat().filter(Boolean));
}

/** @param {string} key */
function named(key) {
  /** @type {Object<string, string>} */
  const names = { Escape: "Esc", ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", " ": "Space" };
  return names[key] ?? key;
}
