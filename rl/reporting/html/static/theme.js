// Light and dark: as the system has it, or as the button says.
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  const KEY = "relay-report-theme";

  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // A browser may keep nothing for files.
    }
  };
  const store = (theme) => {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // It holds until the page is closed.
    }
  };
  const apply = (theme) => {
    root.dataset.theme = theme;
    colors.clear();
    for (const listener of listeners) listener();
  };

  const colors = new Map();
  // The value of a custom property, such as --accent, for canvases.
  relay.color = (name) => {
    if (!colors.has(name)) colors.set(name, getComputedStyle(root).getPropertyValue(name).trim());
    return colors.get(name);
  };
  relay.onTheme = (listener) => listeners.push(listener);
  relay.toggleTheme = () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    store(theme);
    apply(theme);
  };
  system.addEventListener("change", () => stored() || apply(system.matches ? "dark" : "light"));
  apply(stored() || (system.matches ? "dark" : "light"));
})();
