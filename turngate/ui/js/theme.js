/** The theme: light, dark or system. This choice is the only thing that the page stores in the browser. */

const NAME = "turngate-theme";
const NEXT = /** @type {Object<string, string>} */ ({ "": "light", light: "dark", dark: "" });
const SIGN = /** @type {Object<string, string>} */ ({ "": "◐", light: "☀", dark: "☾" });

/** @param {HTMLButtonElement} button switches to the next theme */
export function start(button) {
  const show = (/** @type {string} */ theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = SIGN[theme];
    button.title = `Theme: ${theme || "system"} (T)`;
    button.setAttribute("aria-label", button.title);
  };
  let theme = kept();
  show(theme);
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    localStorage.setItem(NAME, theme);
    show(theme);
  });
}

function kept() {
  const theme = localStorage.getItem(NAME) ?? "";
  return theme in NEXT ? theme : "";
}
