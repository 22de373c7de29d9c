//! `cargo xtask style`: figures about the shape of the production code, each with its limit.

mod public;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use syn::{
    Attribute, Block, ExprMethodCall, ExprUnsafe, ImplItemFn, ItemFn, ItemMod, ItemStruct, Meta,
    Signature, TraitItemFn,
    punctuated::Punctuated,
    spanned::Spanned as _,
    token::Comma,
    visit::{self, Visit},
};

use crate::{doc_comments, repository, workspace};

/// Crates that no user runs.
const FOR_DEVELOPERS: [&str; 5] = ["e2e", "e2e/bench", "fuzz", "polling", "xtask"];
/// Code that a generator wrote.
const GENERATED: &str = "fqdn-proto/src/gen";
/// Folder in which structs with state have few fields.
const CORE: &str = "agent/core/src/core";
/// Structs of the core without state of their own: settings, counters, and views that are sent
/// as JSON.
const WITHOUT_STATE: [&str; 5] = [
    "CoreConfig",
    "Counters",
    "EndpointView",
    "PacketView",
    "Summary",
];

const LONG_FUNCTION: usize = 60;
const MANY_FIELDS: usize = 15;

/// The figures of all production files.
#[derive(Default)]
struct Figures {
    /// Lines of each file without its test modules.
    lines: Vec<usize>,
    functions: Vec<usize>,
    long: Vec<String>,
    large: Vec<String>,
    unwraps: Vec<String>,
    unsafe_files: Vec<String>,
}

/// State of the parser for one file.
struct File<'a> {
    name: &'a str,
    figures: &'a mut Figures,
    test_lines: usize,
    is_unsafe: bool,
}

/// Computes the figures of all production files and prints them.
pub(crate) fn run() -> Result<()> {
    let mut parsed = Vec::new();
    for path in workspace::files()? {
        if is_production(&path) {
            let text = fs::read_to_string(repository::root().join(&path))?;
            let file = syn::parse_file(&text).with_context(|| path.display().to_string())?;
            parsed.push((path, text, file));
        }
    }
    let mut test_files = BTreeSet::new();
    for (path, _, file) in &parsed {
        test_files.extend(test_modules(path, file));
    }
    let mut figures = Figures::default();
    for (path, text, file) in &parsed {
        if !test_files.contains(path) {
            read(&path.to_string_lossy(), text, file, &mut figures);
        }
    }
    figures.print();
    let short = doc_comments::read()?.short;
    figure("doc comments of four words or fewer", short, 500, &[]);
    let unused = public::unused()?;
    let name = "pub items used by no other crate, test or bench";
    figure(name, unused.len(), 0, &unused);
    Ok(())
}

/// Files that `file` includes for tests only.
fn test_modules(path: &Path, file: &syn::File) -> Vec<PathBuf> {
    let is_root = path.ends_with("lib.rs") || path.ends_with("main.rs");
    let beside = path.parent().unwrap_or(path).to_path_buf();
    let dir = if is_root {
        beside
    } else {
        path.with_extension("")
    };
    let modules = file.items.iter().filter_map(|item| match item {
        syn::Item::Mod(item) if item.content.is_none() && is_for_tests(&item.attrs) => {
            Some(dir.join(format!("{}.rs", item.ident)))
        }
        _ => None,
    });
    modules.collect()
}

fn is_production(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "rs")
        && workspace::crate_of(file).is_some_and(|(dir, inner)| {
            inner.starts_with("src") && !FOR_DEVELOPERS.iter().any(|of| dir == Path::new(of))
        })
        && !file.starts_with(GENERATED)
        && !workspace::is_test_file(file)
}

fn read(name: &str, text: &str, parsed: &syn::File, figures: &mut Figures) {
    let mut file = File {
        name,
        figures,
        test_lines: 0,
        is_unsafe: false,
    };
    file.visit_file(parsed);
    let (test_lines, is_unsafe) = (file.test_lines, file.is_unsafe);
    figures.lines.push(text.lines().count() - test_lines);
    if is_unsafe && !name.starts_with("bpf/") {
        figures.unsafe_files.push(name.to_owned());
    }
}

/// `test`, or `any(test, …)`, whose other members are features for tests of other crates.
fn is_test(meta: &Meta) -> bool {
    let Meta::List(list) = meta else {
        return meta.path().is_ident("test");
    };
    let inner = list.parse_args_with(Punctuated::<Meta, Comma>::parse_terminated);
    list.path.is_ident("any") && inner.is_ok_and(|metas| metas.iter().any(is_test))
}

/// Whether an item is compiled for tests only.
pub(crate) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && attribute
                    .parse_args_with(Punctuated::<Meta, Comma>::parse_terminated)
                    .is_ok_and(|metas| metas.iter().any(is_test))
    })
}

impl File<'_> {
    fn function(&mut self, signature: &Signature, block: &Block) {
        let first = signature.span().start().line;
        let lines = block.span().end().line + 1 - first;
        self.figures.functions.push(lines);
        if lines > LONG_FUNCTION {
            let name = &signature.ident;
            let found = format!("{}:{first} {name}: {lines}", self.name);
            self.figures.long.push(found);
        }
    }
}

impl<'ast> Visit<'ast> for File<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        } else if item.content.is_some() {
            self.test_lines += item.span().end().line + 1 - item.span().start().line;
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !is_for_tests(&item.attrs) {
            self.function(&item.sig, &item.block);
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            self.function(&item.sig, &item.block);
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        if let Some(block) = &item.default {
            self.function(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        let name = item.ident.to_string();
        let (fields, has_state) = (item.fields.len(), !WITHOUT_STATE.contains(&name.as_str()));
        if self.name.starts_with(CORE) && has_state && fields > MANY_FIELDS {
            let found = format!("{} {name}: {fields}", self.name);
            self.figures.large.push(found);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        if call.method == "unwrap" {
            let line = call.method.span().start().line;
            self.figures.unwraps.push(format!("{}:{line}", self.name));
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_unsafe(&mut self, block: &'ast ExprUnsafe) {
        self.is_unsafe = true;
        visit::visit_expr_unsafe(self, block);
    }
}

impl Figures {
    fn print(mut self) {
        self.lines.sort_unstable();
        self.functions.sort_unstable();
        let (files, functions) = (&self.lines, &self.functions);
        let total: usize = files.iter().sum();
        println!("{} files of production code, {total} lines", files.len());
        println!("file lines: median {}", at(files, 50));
        figure("file lines: 90th percentile", at(files, 90), 400, &[]);
        figure("file lines: longest", at(files, 100), 600, &[]);
        let median = at(functions, 50);
        println!("{} functions: median {median} lines", functions.len());
        let name = format!("functions over {LONG_FUNCTION} lines");
        figure(&name, self.long.len(), 8, &self.long);
        let name = format!("structs of the core with more than {MANY_FIELDS} fields");
        figure(&name, self.large.len(), 0, &self.large);
        println!("  exempt, without state: {}", WITHOUT_STATE.join(", "));
        figure("unwrap()", self.unwraps.len(), 0, &self.unwraps);
        let files = &self.unsafe_files;
        figure("files with unsafe, outside bpf/", files.len(), 7, files);
    }
}

/// One figure; `found` is listed if it is above `limit`.
fn figure(name: &str, value: usize, limit: usize, found: &[String]) {
    if value <= limit {
        println!("{name}: {value} (limit {limit})");
        return;
    }
    println!("{name}: {value}, above the limit of {limit}");
    for found in found {
        println!("  {found}");
    }
}

/// A percentile of sorted values; 0 if there are none.
fn at(sorted: &[usize], percent: usize) -> usize {
    let last = sorted.len().saturating_sub(1);
    sorted.get(last * percent / 100).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn production_code_is_counted_and_tests_are_not() {
        let long = format!("fn long() {{\n{}}}\n", "    f();\n".repeat(60));
        let fields = "    a: u8,\n".repeat(16);
        let structs = format!("struct S {{\n{fields}}}\nstruct Summary {{\n{fields}}}\n");
        let test = "#[cfg(test)]\nmod tests {\n    fn t() { x.unwrap(); }\n}\n";
        let code = concat!("fn f() { x.unwrap(); unsa", "fe { g() } }\n");
        let text = format!("{long}{structs}{code}{test}");
        let mut figures = Figures::default();
        let file = syn::parse_file(&text).unwrap();
        read("agent/core/src/core/a.rs", &text, &file, &mut figures);
        assert_eq!(figures.lines, [62 + 36 + 1]);
        assert_eq!(figures.functions, [62, 1]);
        assert_eq!(figures.long, ["agent/core/src/core/a.rs:1 long: 62"]);
        assert_eq!(figures.large, ["agent/core/src/core/a.rs S: 16"]);
        assert_eq!(figures.unwraps, ["agent/core/src/core/a.rs:99"]);
        assert_eq!(figures.unsafe_files, ["agent/core/src/core/a.rs"]);
        let file = syn::parse_file("#[cfg(test)]\nmod golden;\nmod b;\n").unwrap();
        let golden = test_modules(Path::new("sdp/src/a.rs"), &file);
        assert_eq!(golden, [Path::new("sdp/src/a/golden.rs")]);
        assert!(is_production(Path::new("sdp/src/a.rs")));
        assert!(!is_production(Path::new("sdp/src/a/tests/b.rs")));
        assert!(!is_production(Path::new("xtask/src/a.rs")));
    }

    #[test]
    fn percentiles_are_values_that_occur() {
        assert_eq!(at(&[], 50), 0);
        assert_eq!(at(&[1, 2, 3], 50), 2);
        assert_eq!(at(&[1, 2, 3], 100), 3);
    }
}
