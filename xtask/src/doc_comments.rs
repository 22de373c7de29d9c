//! Doc comments that only repeat the name of their item.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use syn::{
    Attribute, Expr, ExprLit, Field, File, Ident, ImplItemConst, ImplItemFn, ItemConst, ItemEnum,
    ItemFn, ItemStruct, ItemTrait, ItemType, Lit, Meta, TraitItemFn, Variant,
    visit::{self, Visit},
};

use crate::{repository, workspace};

/// Code that a generator wrote.
const GENERATED: &str = "fqdn-proto/src/gen";
/// Words that add nothing to a name.
const EMPTY: [&str; 16] = [
    "a", "an", "the", "of", "its", "this", "these", "that", "is", "in", "for", "to", "and", "one",
    "all", "each",
];
/// Derives of clap: there, doc comments are the text of `--help`.
const HELP: [&str; 4] = ["Args", "Parser", "Subcommand", "ValueEnum"];
/// Maximum number of words of a short comment.
const SHORT: usize = 4;

/// The comments of the workspace.
#[derive(Default)]
pub(crate) struct Comments {
    /// Comments that repeat the name of their item, one line each.
    pub(crate) repeated: Vec<String>,
    /// Number of comments with at most four words, without texts for `--help`.
    pub(crate) short: usize,
}

/// Reads every Rust file that was not generated.
pub(crate) fn read() -> Result<Comments> {
    let mut comments = Comments::default();
    for path in workspace::files()? {
        if is_rust(&path) {
            let text = fs::read_to_string(repository::root().join(&path))?;
            let file = syn::parse_file(&text).with_context(|| path.display().to_string())?;
            of_file(&path, &file, &mut comments);
        }
    }
    Ok(comments)
}

fn is_rust(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs") && !path.starts_with(GENERATED)
}

fn of_file(path: &Path, file: &File, comments: &mut Comments) {
    let mut reader = Reader {
        path: path.to_path_buf(),
        enclosing: Vec::new(),
        is_help: false,
        comments,
    };
    reader.visit_file(file);
}

struct Reader<'c> {
    path: PathBuf,
    /// Words of the type whose fields or variants are read.
    enclosing: Vec<String>,
    is_help: bool,
    comments: &'c mut Comments,
}

impl Reader<'_> {
    fn item(&mut self, name: &Ident, attributes: &[Attribute]) {
        let lines: Vec<String> = attributes.iter().filter_map(line_of).collect();
        let comment = lines.join(" ");
        if comment.trim().is_empty() || self.is_help || is_help(attributes) {
            return;
        }
        if comment.split_whitespace().count() <= SHORT {
            self.comments.short += 1;
        }
        let said: BTreeSet<String> = words(&comment).collect();
        let named: BTreeSet<String> = parts(&name.to_string())
            .chain(self.enclosing.iter().cloned())
            .collect();
        if said.is_subset(&named) {
            let line = name.span().start().line;
            let path = self.path.display();
            let found = format!(
                "{path}:{line}: the doc comment of `{name}` repeats its name: say what it does not, or delete it"
            );
            self.comments.repeated.push(found);
        }
    }

    fn within(&mut self, name: &Ident, attributes: &[Attribute], visit: impl FnOnce(&mut Self)) {
        self.item(name, attributes);
        let outer = std::mem::replace(&mut self.enclosing, parts(&name.to_string()).collect());
        let was_help = std::mem::replace(&mut self.is_help, is_help(attributes));
        visit(self);
        self.enclosing = outer;
        self.is_help = was_help;
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.within(&item.ident, &item.attrs, |reader| {
            visit::visit_item_struct(reader, item);
        });
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        self.within(&item.ident, &item.attrs, |reader| {
            visit::visit_item_enum(reader, item);
        });
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        self.item(&item.ident, &item.attrs);
        visit::visit_item_trait(self, item);
    }

    fn visit_variant(&mut self, variant: &'ast Variant) {
        self.item(&variant.ident, &variant.attrs);
        visit::visit_variant(self, variant);
    }

    fn visit_field(&mut self, field: &'ast Field) {
        if let Some(name) = &field.ident {
            self.item(name, &field.attrs);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.item(&item.sig.ident, &item.attrs);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.item(&item.sig.ident, &item.attrs);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        self.item(&item.sig.ident, &item.attrs);
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_const(&mut self, item: &'ast ItemConst) {
        self.item(&item.ident, &item.attrs);
    }

    fn visit_impl_item_const(&mut self, item: &'ast ImplItemConst) {
        self.item(&item.ident, &item.attrs);
    }

    fn visit_item_type(&mut self, item: &'ast ItemType) {
        self.item(&item.ident, &item.attrs);
    }
}

/// The text of a line of a doc comment.
fn line_of(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(meta) = &attribute.meta else {
        return None;
    };
    match &meta.value {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text),
            ..
        }) if meta.path.is_ident("doc") => Some(text.value()),
        _ => None,
    }
}

fn is_help(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("derive") => {
            let derives = list.tokens.to_string();
            let mut derives = derives.split(|c: char| !c.is_alphanumeric());
            derives.any(|derive| HELP.contains(&derive))
        }
        meta => meta.path().is_ident("arg") || meta.path().is_ident("command"),
    })
}

/// The words of a comment in the singular, without the words in [`EMPTY`].
fn words(comment: &str) -> impl Iterator<Item = String> {
    comment
        .split(|c: char| !c.is_alphanumeric())
        .map(|word| singular(&word.to_lowercase()))
        .filter(|word| !word.is_empty() && !EMPTY.contains(&word.as_str()))
}

/// The words that a name consists of, in the singular.
fn parts(name: &str) -> impl Iterator<Item = String> {
    let mut words = vec![String::new()];
    for c in name.chars() {
        if c == '_' || c.is_uppercase() {
            words.push(String::new());
        }
        if c != '_'
            && let Some(word) = words.last_mut()
        {
            word.extend(c.to_lowercase());
        }
    }
    // In the name of a constant, capitals do not begin words.
    if name.chars().all(|c| !c.is_lowercase()) {
        words = name.split('_').map(str::to_lowercase).collect();
    }
    words
        .into_iter()
        .filter(|word| !word.is_empty())
        .map(|word| singular(&word))
}

fn singular(word: &str) -> String {
    word.strip_suffix('s').unwrap_or(word).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comments(code: &str) -> Comments {
        let mut comments = Comments::default();
        let file = syn::parse_file(code).unwrap();
        of_file(Path::new("a.rs"), &file, &mut comments);
        comments
    }

    #[test]
    fn a_comment_that_repeats_its_name_is_refused() {
        for code in [
            "/// The endpoints.\nfn endpoints() {}",
            "struct Endpoint {\n/// The endpoint's id.\nid: u32 }",
            "/// Max TTL.\nconst MAX_TTL: u32 = 1;",
            "enum Reason {\n/// No policy.\nNoPolicy }",
        ] {
            assert_eq!(comments(code).repeated.len(), 1, "{code}");
        }
    }

    #[test]
    fn a_comment_that_says_more_or_is_help_stays() {
        for code in [
            "/// The endpoints of this node.\nfn endpoints() {}",
            "struct Endpoint {\n/// Zero: not known yet.\nid: u32 }",
            "#[derive(Debug, Args)]\nstruct Options {\n/// The name\nname: String }",
            "fn without() {}",
        ] {
            assert_eq!(comments(code).repeated.len(), 0, "{code}");
        }
        assert_eq!(comments("/// In seconds.\nfn ttl() {}").short, 1);
    }
}
