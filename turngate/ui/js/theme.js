/** The theme: light, dark or system. The choice is all that the page stores in the browser. */

const NAME = "turngate-theme";
const NEXT = /** @type {Object<string, string>} */ ({ "": "light", light: "dark", dark: "" });
const SIGN = /** @type {Object<string, string>} */ ({ "": "◐", light: "☀", dark: "☾" });

/** @param {HTMLButtonElement} button switches from one to the next */
export function start(button) {
  const show = (/** @type {string} */ theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = SIGN[theme];
    button.title = `Theme: ${theme || "as the system has it"} (T)`;
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
