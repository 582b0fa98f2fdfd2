// The page from top to bottom.
"use strict";
(() => {
  const { el } = relay;
  const AT_ONCE = ["overview", "findings", "curves"];
  const WHEN_NEAR = ["timeline", "time", "rollouts", "events", "config", "environment"];

  document.getElementById("theme").addEventListener("click", relay.toggleTheme);
  document.getElementById("written").textContent = `written ${relay.moment(relay.report.written)}`;
  const begin = (part) => {
    const host = document.querySelector(`#${part} .body`);
    relay.attempt(host, () => relay[part](host));
  };
  AT_ONCE.forEach(begin);
  for (const part of WHEN_NEAR) relay.whenNear(document.getElementById(part), () => begin(part));

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const counted = links.get("findings");
  const numFindings = relay.runs.reduce((sum, run) => sum + run.findings.length, 0);
  if (numFindings) counted.append(el("span.count", {}, String(numFindings)));
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) links.get(entry.target.id)?.classList.toggle("here", entry.isIntersecting);
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const section of document.querySelectorAll("main section")) observer.observe(section);
  document.documentElement.dataset.ready = "true";
})();
