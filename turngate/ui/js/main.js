/**
 * The page: login, the view of each address, the bar, and the live connection. It imports the views, which do not import each other.
 *
 * A view is created by its `show(place)`. It is an object with
 *   element   the element to show
 *   title     the title of the window
 *   keys      its keyboard shortcuts (optional)
 *   changed   called with changes to rollouts (optional)
 *   moved     called with a new address of the same view; returns false if the view must be created again (optional)
 *   leave     called when another view is shown (optional)
 */

import * as api from "./api.js";
import { help } from "./dialog.js";
import { el, fill } from "./dom.js";
import { plural, tick } from "./format.js";
import { seen } from "./hidden.js";
import * as keys from "./keys.js";
import { Live } from "./live.js";
import { empty, failed, loading, say } from "./notice.js";
import { go, here, href } from "./router.js";
import * as theme from "./theme.js";
import * as compare from "./views/compare.js";
import * as failures from "./views/failures.js";
import * as group from "./views/group.js";
import * as groups from "./views/groups.js";
import * as login from "./views/login.js";
import * as rollout from "./views/rollout.js";
import * as rollouts from "./views/rollouts.js";
import * as training from "./views/training.js";

/** @typedef {{element: HTMLElement, title: string, keys?: keys.Binding[], changed?: (c: import("./live.js").Changes) => void,
 *   moved?: (place: import("./router.js").Place) => boolean, leave?: () => void}} View */

/** @type {Object<string, (place: import("./router.js").Place) => View>} */
const VIEWS = {
  rollouts: rollouts.show,
  groups: groups.show,
  group: group.show,
  rollout: rollout.show,
  compare: compare.show,
  training: training.show,
  failures: failures.show,
};
/** @type {[string, string, string[]][]} name, label, and the views that belong to it */
const NAV = [
  ["rollouts", "Rollouts", ["rollouts", "rollout"]],
  ["groups", "Groups", ["groups", "group", "compare"]],
  ["training", "Training", ["training"]],
  ["failures", "Failures", ["failures"]],
];

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const bar = /** @type {HTMLElement} */ (document.getElementById("bar"));
const nav = /** @type {HTMLElement} */ (document.getElementById("nav"));
const filling = el("div.notice"); // says that the lists are being filled
const state = /** @type {HTMLElement} */ (document.getElementById("live"));

const FILLING_MS = 3000; // how often to check whether the lists are complete

/** @type {View | null} */
let view = null;
let shown = ""; // the name and first part of the current address
let inside = false; // whether the user is logged in
let moves = 0; // address changes within the page

const live = new Live((changes) => view?.changed?.(changes), showState);

/** @param {"live" | "lost" | "waiting"} now @param {number} seconds */
function showState(now, seconds) {
  state.dataset.state = now;
  state.textContent =
    now === "live" ? "live" : now === "lost" ? `disconnected, retrying in ${Math.ceil(seconds)} s` : "connecting";
}

function route() {
  if (!inside) return;
  const place = here();
  const make = Object.hasOwn(VIEWS, place.name) ? VIEWS[place.name] : null;
  if (!place.name) return void location.replace(href(["rollouts"]));
  const same = `${place.name}/${place.name === "compare" ? place.parts.join("/") : (place.parts[0] ?? "")}`;
  if (view && same === shown && view.moved?.(place)) return;
  leave();
  shown = same;
  view = make ? make(place) : unknown(place.name);
  keys.bind(view.keys ?? []);
  document.title = seen(`${view.title} · Turngate`);
  for (const link of nav.children) {
    const mine = NAV.find(([name]) => name === link.getAttribute("data-name"))?.[2] ?? [];
    if (mine.includes(place.name)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  fill(main, view.element);
  main.scrollTop = 0;
}

function leave() {
  view?.leave?.();
  view = null;
  shown = "";
  keys.bind([]);
}

/** @param {string} name @returns {View} */
function unknown(name) {
  const back = el("a.button", { href: href(["rollouts"]), text: "All rollouts" });
  return {
    element: empty("Page not found", `There is no page “${name}”. Check the address.`, back),
    title: "Not found",
  };
}

/** After login, show the bar, connect, and show the view. Connect before showing the view, so that the view misses no change. */
async function enter() {
  bar.hidden = false;
  showState("waiting", 0);
  fill(main, loading());
  let got;
  try {
    got = await api.overview();
  } catch (error) {
    if (!(error instanceof api.Refused)) throw error;
    if (error.status === 401) ask(error.message);
    else fill(main, failed(error, enter));
    return;
  }
  inside = true;
  live.start(got.cursor);
  route();
  watchFilling(got);
}

/**
 * While the lists of a shared store are being filled, say that rollouts are missing from them. When they are complete, show the view
 * again.
 * @param {api.Json} got
 */
function watchFilling(got) {
  if (!inside) return;
  if (got.incomplete) {
    filling.textContent =
      "The lists are being rebuilt. Some rollouts are still missing " +
      `(${plural(got.rollouts, "rollout")} listed so far).`;
    document.getElementById("notices")?.append(filling);
    setTimeout(() => api.overview().then(watchFilling, () => watchFilling(got)), FILLING_MS);
  } else if (filling.isConnected) {
    filling.remove();
    leave();
    route();
  }
}

/** Show the login form. @param {string} [why] */
function ask(why = "") {
  inside = false;
  live.stop();
  leave();
  bar.hidden = true;
  filling.remove();
  document.title = "Turngate";
  document.querySelectorAll("dialog[open]").forEach((dialog) => dialog.remove());
  fill(main, login.form(enter, why));
  main.querySelector("input")?.focus();
}

async function signOut() {
  await api.logout();
  ask("You are signed out.");
}

function press(/** @type {string} */ id) {
  document.getElementById(id)?.click();
}

function start() {
  theme.start(/** @type {HTMLButtonElement} */ (document.getElementById("theme")));
  fill(nav, ...NAV.map(([name, label]) => el("a", { href: href([name]), data: { name }, text: label })));
  document.getElementById("help")?.addEventListener("click", help);
  document
    .getElementById("signout")
    ?.addEventListener("click", () => signOut().catch((error) => say(error.message, "bad")));
  document.getElementById("skip")?.addEventListener("click", (event) => {
    event.preventDefault(); // the hash belongs to the view
    main.focus();
  });
  state.addEventListener("click", () => live.now());
  window.addEventListener("hashchange", () => {
    moves += 1;
    route();
  });
  window.addEventListener("online", () => live.now());
  api.onSignedOut(() => inside && ask("Your login has expired. Sign in again to continue where you left off."));
  keys.always([
    { key: "?", does: "show this list", run: help },
    { key: "g", does: "groups", run: () => go(href(["groups"])) },
    { key: "r", does: "rollouts", run: () => go(href(["rollouts"])) },
    { key: "T", does: "theme: light, dark or system", run: () => press("theme") },
    { key: "Escape", does: "back", run: () => (moves ? history.back() : go(href(["rollouts"]))) },
  ]);
  keys.listen();
  setInterval(tick, 5000);
  api.me().then(enter, (error) => ask(error.status === 401 ? "" : error.message));
}

start();
