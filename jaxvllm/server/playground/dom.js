// Makes elements, always from text: nothing from a server or a model is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** Makes an element with these properties and children. A string among the children is text. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Makes a button. Its class determines what it does: see main.js. */
export const button = (className, text) => make("button", { className, type: "button" }, text);
