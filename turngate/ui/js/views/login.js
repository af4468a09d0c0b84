/** The login form. The key is sent in one request, and is never stored or put in an address. */

import * as api from "../api.js";
import { el } from "../dom.js";

/**
 * @param {() => Promise<void>} entered called when the key was accepted
 * @param {string} why the message to show
 */
export function form(entered, why) {
  const key = el("input.field", {
    id: "key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "key-help",
  });
  const trouble = el("p.login-trouble", { role: "alert", text: why });
  const button = el("button.button.is-primary", { type: "submit", text: "Sign in" });
  const made = el(
    "form.login",
    { "aria-labelledby": "login-title" },
    el("h1", { id: "login-title", text: "Turngate" }),
    el("label", { for: "key", text: "Admin key or API key of this gateway" }),
    key,
    button,
    trouble,
    el(
      "p.muted",
      { id: "key-help" },
      "The admin key is the value of ",
      el("code", { text: "TURNGATE_ADMIN_KEY" }),
      ", or the content of the file ",
      el("code", { text: "admin-key" }),
      " in the gateway's data folder. An API key needs the scope ",
      el("code", { text: "traces" }),
      " or ",
      el("code", { text: "admin" }),
      ".",
    ),
  );
  made.addEventListener("submit", async (/** @type {Event} */ event) => {
    event.preventDefault();
    button.disabled = true;
    trouble.textContent = "";
    const given = key.value.trim();
    key.value = "";
    try {
      await api.login(given);
      await entered();
    } catch (error) {
      trouble.textContent = error instanceof api.Refused ? error.message : String(error);
      key.focus();
    } finally {
      button.disabled = false;
    }
  });
  return made;
}
