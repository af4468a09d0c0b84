/**
 * A minimap of the branch beside its tokens: each row of pixels has the color of the least likely token there. A click scrolls to that
 * place. Keyboard users can press `n` and `N` instead.
 */

import { stepOf } from "./probability.js";
import { el } from "./dom.js";

const WIDTH = 14;

export class TokenMap {
  /** @param {import("./windowed.js").Windowed} list the list that the minimap shows */
  constructor(list) {
    this.list = list;
    this.canvas = el("canvas.map-picture", { width: WIDTH, height: 1 });
    this.frame = el("div.map-frame");
    this.element = el("div.map", { "aria-hidden": "true" }, this.canvas, this.frame);
    this.element.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => this.#drag(event));
    this.element.addEventListener(
      "pointermove",
      (/** @type {PointerEvent} */ event) => event.buttons === 1 && this.#drag(event),
    );
    list.element.addEventListener("scroll", () => this.#place(), { passive: true });
  }

  /** Redraw the minimap. @param {import("./tokenlines.js").TokenLines} tokens */
  show(tokens) {
    const height = this.element.clientHeight;
    const { lines } = tokens;
    this.#place();
    if (!height || !lines.length) return;
    this.canvas.height = height;
    const paint = this.canvas.getContext("2d");
    const look = getComputedStyle(this.element);
    const colors = new Map(["p1", "p2", "p3", "p4", "p5"].map((step) => [step, resolved(look, step)]));
    colors.set("p0", resolved(look, "line"));
    const lowest = lines.map((line) => leastLikely(tokens, line));
    const size = Math.max(1, Math.min(3, height / lines.length));
    for (let y = 0; y < height; y += 1) {
      const from = Math.floor((y / height) * lines.length);
      const past = Math.max(from + 1, Math.floor(((y + 1) / height) * lines.length));
      const known = lowest.slice(from, past).filter((one) => one !== null);
      if (!known.length) continue;
      paint.fillStyle = colors.get(stepOf(Math.min(.../** @type {number[]} */ (known))));
      paint.fillRect(2, y, WIDTH - 4, size);
    }
  }

  #place() {
    const { scrollTop, clientHeight, scrollHeight } = this.list.element;
    const height = this.element.clientHeight;
    const share = Math.min(1, clientHeight / Math.max(1, scrollHeight));
    this.frame.style.height = `${Math.max(8, share * height)}px`;
    this.frame.style.transform = `translateY(${(scrollTop / Math.max(1, scrollHeight)) * height}px)`;
  }

  /** @param {PointerEvent} event */
  #drag(event) {
    const box = this.element.getBoundingClientRect();
    const { scrollHeight, clientHeight } = this.list.element;
    this.list.element.scrollTop = ((event.clientY - box.top) / box.height) * scrollHeight - clientHeight / 2;
  }
}

/** @param {import("./tokenlines.js").TokenLines} tokens @param {import("./tokenlines.js").Line} line @returns {number | null} */
function leastLikely(tokens, line) {
  if (line.held.node.kind !== "sampled") return null;
  let lowest = null;
  for (let i = line.from; i < line.to; i++) {
    const one = tokens.logprobs[i];
    if (one !== null && (lowest === null || one < lowest)) lowest = one;
  }
  return lowest;
}

/**
 * Return one of our colors in the current theme, because a canvas does not support `light-dark`.
 * @param {CSSStyleDeclaration} look
 * @param {string} name
 */
function resolved(look, name) {
  const given = look.getPropertyValue(`--${name}`);
  const found = given.match(/light-dark\(\s*([^,]+),\s*([^)]+)\)/);
  if (!found) return given;
  const chosen = document.documentElement.dataset.theme;
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  return dark ? found[2] : found[1];
}
