/**
 * Create elements. All modules use `el` and `svg`, and nothing else creates markup: text becomes text nodes, so an agent's output is
 * never parsed as HTML. Attributes that could run code are rejected, and invisible characters are replaced by visible signs.
 */

import { seen } from "./hidden.js";

const SVG = "http://www.w3.org/2000/svg";
const TOLD = new Set(["title", "aria-label", "placeholder"]); // attributes whose text is shown or read out

/**
 * @typedef {Node | string | number | null | undefined | false} Child
 * @typedef {Object<string, any>} Props attributes; `on` holds listeners by name, `text` a text, `data` data attributes
 */

/**
 * Create an HTML element.
 * @param {string} spec its tag and classes: "div.row.is-new"
 * @param {Props | null} [props]
 * @param {...(Child | Child[])} kids
 * @returns {any}
 */
export function el(spec, props, ...kids) {
  const [tag, ...classes] = spec.split(".");
  return filled(document.createElement(tag), classes, props, kids);
}

/**
 * Create an SVG element.
 * @param {string} spec
 * @param {Props | null} [props]
 * @param {...(Child | Child[])} kids
 * @returns {any}
 */
export function svg(spec, props, ...kids) {
  const [tag, ...classes] = spec.split(".");
  return filled(document.createElementNS(SVG, tag), classes, props, kids);
}

/**
 * Replace the content of `parent`.
 * @param {Element} parent
 * @param {...(Child | Child[])} kids
 */
export function fill(parent, ...kids) {
  parent.replaceChildren(...nodes(kids));
}

/**
 * Append to `parent`, skipping empty children.
 * @param {Element} parent
 * @param {...(Child | Child[])} kids
 */
export function add(parent, ...kids) {
  parent.append(...nodes(kids));
}

/**
 * @param {Element} made
 * @param {string[]} classes
 * @param {Props | null | undefined} props
 * @param {(Child | Child[])[]} kids
 */
function filled(made, classes, props, kids) {
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(props ?? {})) set(made, name, value);
  made.append(...nodes(kids));
  return made;
}

/**
 * @param {Element} made
 * @param {string} name
 * @param {any} value
 */
function set(made, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name === "on") {
    for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
  } else if (name === "text") {
    made.textContent = seen(String(value));
  } else if (name === "data") {
    for (const [key, held] of Object.entries(value)) made.setAttribute(`data-${key}`, String(held));
  } else if (name === "class") {
    made.classList.add(...String(value).split(" ").filter(Boolean));
  } else if (/^on|^style$|^srcdoc$/i.test(name)) {
    throw new Error(`attribute ${name} is not allowed, because it could contain inline scripts or styles`);
  } else if (/^(href|src|action|formaction|xlink:href)$/i.test(name) && !/^(#|\/(?!\/))/.test(String(value))) {
    throw new Error(`attribute ${name} must be an address on this site, not ${value}`);
  } else {
    made.setAttribute(name, value === true ? "" : TOLD.has(name) ? seen(String(value)) : String(value));
  }
}

/**
 * @param {(Child | Child[])[]} kids
 * @returns {(Node | string)[]}
 */
function nodes(kids) {
  /** @type {(Node | string)[]} */
  const found = [];
  for (const kid of kids.flat(3)) {
    if (kid === null || kid === undefined || kid === false) continue;
    found.push(kid instanceof Node ? kid : seen(String(kid)));
  }
  return found;
}
